"""The kernels of block-sparse attention. A tile of queries is one block, so it shares the blocks near it.

    far_forward     key block by key block: the queries that chose it are gathered; a part of out and lse for each
    forward         query block by query block: the first block and those near; then the far parts are joined
    row_products    delta[i] = dout[i] . out[i]
    far_backward    key block by key block: dk and dv, and a part of dq for each query that chose it
    first_backward  parts of dk and dv of the first block of a segment, which every query attends to
    dq, dkdv        the same for the shared blocks; they add what the far ones and the parts gave

A far block is full and lies before its queries, so it needs no mask. Nothing is added by atomics: results do not depend
on the order of programs. Scores are in base 2, as in attention/score_kernels.py.

Dims: M = rows of a tile, N = keys of a block (at least 16), D and E = features, DW and EW = the same, padded.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def base_2(high, low, ACC: tl.constexpr):
    """scale * log2(e). A kernel receives floats as fp32; fp64 needs the rest."""
    return tl.full([], 1.0, ACC) * high + low


@triton.jit
def load(ptr, row, stride, there, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED]: rows of WIDTH features at ptr + row * stride."""
    c = tl.arange(0, PADDED)
    return tl.load(ptr + row.to(tl.int64)[:, None] * stride + c[None, :], there[:, None] & (c < WIDTH)[None, :], 0.0)


@triton.jit
def save(ptr, row, stride, x, there, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    c = tl.arange(0, PADDED)
    tl.store(ptr + row.to(tl.int64)[:, None] * stride + c[None, :], x, there[:, None] & (c < WIDTH)[None, :])


@triton.jit
def routed(order_ptr, ends_ptr, starts_ptr, route, at, top, G, M: tl.constexpr):
    """Some queries that chose the block of a route: their tokens, which of their choices it is, and the block's first
    key. Route r is block r % blocks of key head r // blocks."""
    begin = tl.load(ends_ptr + route)
    row = begin + at + tl.arange(0, M)
    there = row < tl.load(ends_ptr + route + 1)
    index = tl.load(order_ptr + row, there, 0)
    return (index // (G * top)).to(tl.int64), index % top, there


@triton.jit(do_not_specialize=["blocks", "G", "H", "top", "size"])
def far_forward(
    q_ptr, k_ptr, v_ptr, order_ptr, ends_ptr, starts_ptr, part_ptr, part_lse_ptr, blocks, G, H, top, size, scale_high,
    scale_low,
    q_stride, q_head, k_stride, k_head, v_stride, v_head,
    D: tl.constexpr, E: tl.constexpr, DW: tl.constexpr, EW: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    scale = base_2(scale_high, scale_low, ACC)
    route, h = tl.program_id(0), tl.program_id(1)
    g = route // blocks
    head = (g * (H // G) + h).to(tl.int64)
    count = tl.load(ends_ptr + route + 1) - tl.load(ends_ptr + route)
    key = tl.load(starts_ptr + route % blocks) + tl.arange(0, N)
    real = tl.arange(0, N) < size
    if count > 0:
        k = load(k_ptr + g.to(tl.int64) * k_head, key, k_stride, real, D, DW)
        v = load(v_ptr + g.to(tl.int64) * v_head, key, v_stride, real, E, EW)
        for at in range(0, count, M):
            token, which, there = routed(order_ptr, ends_ptr, starts_ptr, route, at, top, G, M)
            q = load(q_ptr + head * q_head, token, q_stride, there, D, DW)
            s = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC) * scale
            s = tl.where(real[None, :], s, float("-inf"))
            high = tl.max(s, 1)
            p = tl.exp2(s - high[:, None])
            total = tl.sum(p, 1)
            out = tl.dot(p.to(v.dtype), v, input_precision="ieee", out_dtype=ACC) / total[:, None]
            row = (token * H + head) * top + which
            save(part_ptr, row, E, out, there, E, EW)
            tl.store(part_lse_ptr + row, high + tl.log2(total), there)


@triton.jit
def tile_of(tiles_ptr, at, size, near, dense_below):
    """A block of queries: the begin and length of its segment, its number, and the first of the blocks near it."""
    begin, length, own = tl.load(tiles_ptr + 4 * at), tl.load(tiles_ptr + 4 * at + 1), tl.load(tiles_ptr + 4 * at + 2)
    low = tl.where(own * size < dense_below, 0, tl.maximum(own - near, 0))
    return begin.to(tl.int64), length, own, low


@triton.jit
def rows_of(block, size, length, N: tl.constexpr):
    """The rows of a block: their places in it, in the sequence, and whether they are there."""
    r = tl.arange(0, N)
    i = block * size + r
    return r, i, (r < size) & (i < length)


@triton.jit(do_not_specialize=["G", "H", "top", "size", "near", "dense_below"])
def forward(
    q_ptr, k_ptr, v_ptr, tiles_ptr, part_ptr, part_lse_ptr, out_ptr, lse_ptr, G, H, top, size, near, dense_below,
    scale_high, scale_low,
    q_stride, q_head, k_stride, k_head, v_stride, v_head,
    D: tl.constexpr, E: tl.constexpr, DW: tl.constexpr, EW: tl.constexpr, N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    scale = base_2(scale_high, scale_low, ACC)
    begin, length, own, low = tile_of(tiles_ptr, tl.program_id(0), size, near, dense_below)
    if length == 0:
        return
    head = tl.program_id(1).to(tl.int64)
    g = head // (H // G)
    r, i, there = rows_of(own, size, length, N)
    q = load(q_ptr + head * q_head, begin + i, q_stride, there, D, DW)
    top_score, total, mixed = tl.full([N], float("-inf"), ACC), tl.zeros([N], ACC), tl.zeros([N, EW], ACC)
    first = tl.where(low > 0, -1, 0)  # one more round for block 0
    for at in range(first, own - low + 1):
        block = tl.where(at < 0, 0, low + at)
        j = block * size + r
        real = (r < size) & (j < length)
        k = load(k_ptr + g * k_head, begin + j, k_stride, real, D, DW)
        v = load(v_ptr + g * v_head, begin + j, v_stride, real, E, EW)
        s = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC) * scale
        s = tl.where(real[None, :] & (j[None, :] <= i[:, None]), s, float("-inf"))
        higher = tl.maximum(top_score, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept, p = tl.exp2(top_score - base), tl.exp2(s - base[:, None])
        mixed = tl.dot(p.to(v.dtype), v, mixed * kept[:, None], input_precision="ieee", out_dtype=ACC)
        top_score, total = higher, total * kept + tl.sum(p, 1)
    row = (begin + i) * H + head
    if low > 1:
        for c in range(top):
            lse = tl.load(part_lse_ptr + row * top + c, there, float("-inf")).to(ACC)
            higher = tl.maximum(top_score, lse)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            kept, weight = tl.exp2(top_score - base), tl.exp2(lse - base)
            part = load(part_ptr, row * top + c, E, there & (weight > 0), E, EW).to(ACC)
            mixed = mixed * kept[:, None] + part * weight[:, None]
            top_score, total = higher, total * kept + weight
    save(out_ptr, row, E, mixed / total[:, None], there, E, EW)
    tl.store(lse_ptr + row, (top_score + tl.log2(total)) * LN2, there)


@triton.jit
def row_products(
    dout_ptr, out_ptr, delta_ptr, rows, H, dout_stride, dout_head, E: tl.constexpr, EW: tl.constexpr, M: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    c, there = tl.arange(0, EW), row < rows
    inside = there[:, None] & (c < E)[None, :]
    at = row // H * dout_stride + row % H * dout_head
    dout = tl.load(dout_ptr + at[:, None] + c[None, :], inside, 0.0).to(ACC)
    out = tl.load(out_ptr + row[:, None] * E + c[None, :], inside, 0.0).to(ACC)
    tl.store(delta_ptr + row, tl.sum(dout * out, 1), there)


@triton.jit(do_not_specialize=["blocks", "G", "H", "top", "size"])
def far_backward(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, order_ptr, ends_ptr, starts_ptr, dq_part_ptr, dk_ptr, dv_ptr,
    blocks, G, H, top, size, scale_high, scale_low, q_stride, q_head, k_stride, k_head, v_stride, v_head, dout_stride,
    dout_head,
    D: tl.constexpr, E: tl.constexpr, DW: tl.constexpr, EW: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    scale = base_2(scale_high, scale_low, ACC)
    route = tl.program_id(0)
    g = (route // blocks).to(tl.int64)
    count = tl.load(ends_ptr + route + 1) - tl.load(ends_ptr + route)
    if count == 0:
        return
    key = tl.load(starts_ptr + route % blocks) + tl.arange(0, N)
    real = tl.arange(0, N) < size
    k = load(k_ptr + g * k_head, key, k_stride, real, D, DW)
    v = load(v_ptr + g * v_head, key, v_stride, real, E, EW)
    dk, dv = tl.zeros([N, DW], ACC), tl.zeros([N, EW], ACC)
    for at in range(0, count, M):
        token, which, there = routed(order_ptr, ends_ptr, starts_ptr, route, at, top, G, M)
        for h in range(H // G):
            head = g * (H // G) + h
            row = token * H + head
            q = load(q_ptr + head * q_head, token, q_stride, there, D, DW)
            do = load(dout_ptr + head * dout_head, token, dout_stride, there, E, EW)
            lse = tl.load(lse_ptr + row, there, float("inf")) * LOG2E
            delta = tl.load(delta_ptr + row, there, 0.0)
            s = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC) * scale
            p = tl.where(real[None, :] & there[:, None], tl.exp2(s - lse[:, None]), 0.0)
            dp = tl.dot(do, v.T, input_precision="ieee", out_dtype=ACC)
            ds = (p * (dp - delta[:, None]) * (scale * LN2)).to(q.dtype)
            dv = tl.dot(p.to(do.dtype).T, do, dv, input_precision="ieee", out_dtype=ACC)
            dk = tl.dot(ds.T, q, dk, input_precision="ieee", out_dtype=ACC)
            dq = tl.dot(ds, k, input_precision="ieee", out_dtype=ACC)
            save(dq_part_ptr, row * top + which, D, dq, there, D, DW)
    save(dk_ptr + g * D, key, G * D, dk, real, D, DW)
    save(dv_ptr + g * E, key, G * E, dv, real, E, EW)


@triton.jit(do_not_specialize=["G", "H", "K", "top", "size", "near", "dense_below"])
def dq(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, tiles_ptr, blocks_ptr, dq_part_ptr, dq_ptr, G, H, K, top, size,
    near, dense_below, scale_high, scale_low, q_stride, q_head, k_stride, k_head, v_stride, v_head, dout_stride,
    dout_head,
    D: tl.constexpr, E: tl.constexpr, DW: tl.constexpr, EW: tl.constexpr, N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    scale = base_2(scale_high, scale_low, ACC)
    begin, length, own, low = tile_of(tiles_ptr, tl.program_id(0), size, near, dense_below)
    if length == 0:
        return
    r, i, there = rows_of(own, size, length, N)
    head = tl.program_id(1).to(tl.int64)
    g = head // (H // G)
    row = (begin + i) * H + head
    q = load(q_ptr + head * q_head, begin + i, q_stride, there, D, DW)
    do = load(dout_ptr + head * dout_head, begin + i, dout_stride, there, E, EW)
    lse = tl.load(lse_ptr + row, there, float("inf")) * LOG2E
    delta = tl.load(delta_ptr + row, there, 0.0)
    total = tl.zeros([N, DW], ACC)
    first = tl.where(low > 0, -1, 0)
    for at in range(first, own - low + 1):
        j = tl.where(at < 0, 0, low + at) * size + r
        real = (r < size) & (j < length)
        k = load(k_ptr + g * k_head, begin + j, k_stride, real, D, DW)
        v = load(v_ptr + g * v_head, begin + j, v_stride, real, E, EW)
        s = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC) * scale
        seen = real[None, :] & (j[None, :] <= i[:, None]) & there[:, None]
        p = tl.where(seen, tl.exp2(s - lse[:, None]), 0.0)
        dp = tl.dot(do, v.T, input_precision="ieee", out_dtype=ACC)
        ds = (p * (dp - delta[:, None]) * (scale * LN2)).to(k.dtype)
        total = tl.dot(ds, k, total, input_precision="ieee", out_dtype=ACC)
    if low > 1:
        for c in range(top):
            block = tl.load(blocks_ptr + ((begin + i) * G + g) * K + c + 1, there & (c + 1 < K), -1)
            total += load(dq_part_ptr, row * top + c, D, (block > 0) & (block < low), D, DW).to(ACC)
    save(dq_ptr, row, D, total, there, D, DW)


@triton.jit
def add_queries(
    q_ptr, k, v, dout_ptr, lse_ptr, delta_ptr, begin, first, end, j, real, g, H, G, scale, q_stride, q_head,
    dout_stride, dout_head, dk, dv, D: tl.constexpr, E: tl.constexpr, DW: tl.constexpr, EW: tl.constexpr,
    M: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dk and dv of keys at positions j, with what the queries from `first` to `end` of the segment add."""
    for at in range(first, end, M):
        i = at + tl.arange(0, M)
        there = i < end
        for h in range(H // G):
            head = g * (H // G) + h
            row = (begin + i) * H + head
            q = load(q_ptr + head * q_head, begin + i, q_stride, there, D, DW)
            do = load(dout_ptr + head * dout_head, begin + i, dout_stride, there, E, EW)
            lse = tl.load(lse_ptr + row, there, float("inf")) * LOG2E
            delta = tl.load(delta_ptr + row, there, 0.0)
            s = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC) * scale
            seen = real[None, :] & (j[None, :] <= i[:, None]) & there[:, None]
            p = tl.where(seen, tl.exp2(s - lse[:, None]), 0.0)
            dp = tl.dot(do, v.T, input_precision="ieee", out_dtype=ACC)
            ds = (p * (dp - delta[:, None]) * (scale * LN2)).to(q.dtype)
            dv = tl.dot(p.to(do.dtype).T, do, dv, input_precision="ieee", out_dtype=ACC)
            dk = tl.dot(ds.T, q, dk, input_precision="ieee", out_dtype=ACC)
    return dk, dv


@triton.jit
def shared_end(own, size, near, dense_below, length):
    """The end of the queries that attend to a block because it is near, or because they attend to all."""
    return tl.minimum((tl.maximum(own + near, dense_below // size - 1) + 1) * size, length)


@triton.jit(do_not_specialize=["G", "H", "size", "near", "dense_below"])
def first_backward(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, tiles_ptr, dk_part_ptr, dv_part_ptr, G, H, size, near,
    dense_below, scale_high, scale_low, q_stride, q_head, k_stride, k_head, v_stride, v_head, dout_stride, dout_head,
    D: tl.constexpr, E: tl.constexpr, DW: tl.constexpr, EW: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ACC: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """What RUN blocks of queries that are not near the first block add to its dk and dv: part `place` of the parts."""
    scale = base_2(scale_high, scale_low, ACC)
    at = tl.program_id(0)
    begin, length, own, _ = tile_of(tiles_ptr, at, size, near, dense_below)
    first = tl.maximum(own * size, shared_end(0, size, near, dense_below, length))
    end = tl.minimum((own + RUN) * size, length)
    if (length == 0) | (own % RUN != 0) | (first >= end):
        return
    g = tl.program_id(1).to(tl.int64)
    r, j, real = rows_of(0, size, length, N)
    k = load(k_ptr + g * k_head, begin + j, k_stride, real, D, DW)
    v = load(v_ptr + g * v_head, begin + j, v_stride, real, E, EW)
    dk, dv = add_queries(
        q_ptr, k, v, dout_ptr, lse_ptr, delta_ptr, begin, first, end, j, real, g, H, G, scale, q_stride, q_head,
        dout_stride, dout_head, tl.zeros([N, DW], ACC), tl.zeros([N, EW], ACC), D, E, DW, EW, M, ACC,
    )  # fmt: skip
    place = (tl.load(tiles_ptr + 4 * at + 3) + own // RUN) * G + g
    save(dk_part_ptr + place * N * D, r, D, dk, real, D, DW)
    save(dv_part_ptr + place * N * E, r, E, dv, real, E, EW)


@triton.jit(do_not_specialize=["G", "H", "size", "near", "dense_below"])
def dkdv(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, tiles_ptr, far_dk_ptr, far_dv_ptr, dk_part_ptr, dv_part_ptr,
    dk_ptr, dv_ptr, G, H, size, near, dense_below, scale_high, scale_low, q_stride, q_head, k_stride, k_head,
    v_stride, v_head,
    dout_stride, dout_head, D: tl.constexpr, E: tl.constexpr, DW: tl.constexpr, EW: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, ACC: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    scale = base_2(scale_high, scale_low, ACC)
    at = tl.program_id(0)
    begin, length, own, _ = tile_of(tiles_ptr, at, size, near, dense_below)
    if length == 0:
        return
    g = tl.program_id(1).to(tl.int64)
    r, j, real = rows_of(own, size, length, N)
    k = load(k_ptr + g * k_head, begin + j, k_stride, real, D, DW)
    v = load(v_ptr + g * v_head, begin + j, v_stride, real, E, EW)
    dk = load(far_dk_ptr + g * D, begin + j, G * D, real, D, DW)
    dv = load(far_dv_ptr + g * E, begin + j, G * E, real, E, EW)
    end = shared_end(own, size, near, dense_below, length)
    if own == 0:
        for run in range(end // (RUN * size), tl.where(end < length, tl.cdiv(length, RUN * size), 0)):
            place = (tl.load(tiles_ptr + 4 * at + 3) + run) * G + g
            dk += load(dk_part_ptr + place * N * D, r, D, real, D, DW)
            dv += load(dv_part_ptr + place * N * E, r, E, real, E, EW)
    dk, dv = add_queries(
        q_ptr, k, v, dout_ptr, lse_ptr, delta_ptr, begin, own * size, end, j, real, g, H, G, scale, q_stride, q_head,
        dout_stride, dout_head, dk, dv, D, E, DW, EW, M, ACC,
    )  # fmt: skip
    save(dk_ptr + g * D, begin + j, G * D, dk, real, D, DW)
    save(dv_ptr + g * E, begin + j, G * E, dv, real, E, EW)
