"""The kernels of paged attention: a program computes a tile of queries over a range of keys; another kernel joins them.

The rows of a tile are the query heads of one key head, for one or several tokens of one sequence, so that keys and
values are read once for all of them. A decode has one token per tile. The keys may be split into ranges of a fixed
length with one program each, which fills a GPU if there are few sequences. The online softmax is that of attention's
forward kernel, and so are the scores (attention/score_kernels.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from bagu.ops.attention.score_kernels import LN2, LOG2E, score

__all__ = ["join_kernel", "paged_kernel"]


@triton.jit
def _sequence_of(cu_ptr, tile, sequences, TOKENS: tl.constexpr):
    """The sequence of a tile. Sequence s has the tiles from cu[s] // TOKENS + s on, at least as many as it needs."""
    low, high = 0, sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_ptr + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _load_keys(ptr, slot, g, there, block_stride, row_stride, head_stride, B: tl.constexpr, FEATURES: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """[N, WIDTH]: one head of the rows `slot` of the pool, zeros where a key is not `there`."""
    c = tl.arange(0, WIDTH)
    at = slot // B * block_stride + slot % B * row_stride + g * head_stride
    return tl.load(ptr + at[:, None] + c[None, :], there[:, None] & (c < FEATURES)[None, :], 0.0)


@triton.jit
def _load_scales(ptr, slot, g, there, block_stride, row_stride, head_stride, B: tl.constexpr):
    """[1, N]: the scales of one head of the rows `slot` of an 8-bit pool."""
    return tl.load(ptr + slot // B * block_stride + slot % B * row_stride + g * head_stride, there, 0.0)[None, :]


@triton.jit(do_not_specialize=["sequences", "T", "H", "per_group", "window"])
def paged_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, cu_ptr, lengths_ptr, slopes_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, out_ptr,
    lse_ptr, sequences, T, H, per_group, window, scale_high, scale_low, table_stride, q_stride, q_head_stride,
    k_block_stride, k_row_stride, k_head_stride, v_block_stride, v_row_stride, v_head_stride, k_scale_block_stride,
    k_scale_row_stride, k_scale_head_stride, v_scale_block_stride, v_scale_row_stride, v_scale_head_stride,
    B: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr,
    DW: tl.constexpr, EW: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, ONE: tl.constexpr,
    WINDOW: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    tile, g, split = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    s, block = tile, 0
    if not ONE:  # the tiles of a sequence are numbered from its first; the last of them attend to the most keys
        s = _sequence_of(cu_ptr, tile, sequences, TOKENS)
        block = tile - (tl.load(cu_ptr + s) // TOKENS + s)
    begin, context = tl.load(cu_ptr + s), tl.load(lengths_ptr + s)
    new = tl.load(cu_ptr + s + 1) - begin
    if block * TOKENS >= new:
        return
    M: tl.constexpr = TOKENS * HEADS
    r = tl.arange(0, M)
    token, head = block * TOKENS + r // HEADS, r % HEADS  # of the sequence's new tokens, of the key head's query heads
    real = (token < new) & (head < per_group)
    i, h, row = context - new + token, g * per_group + head, (begin + token).to(tl.int64)
    into = (split * T.to(tl.int64) + row) * H + h  # [splits, T, H]

    lowest = context - new + block * TOKENS  # the position of the tile's first query
    first, end, needed = split * SPLIT, tl.minimum(lowest + TOKENS, context), 0
    if SPLIT > 0:
        end = tl.minimum(end, first + SPLIT)
    if WINDOW:  # keys before the first query's window are not read: their blocks may be released
        needed = tl.maximum(lowest - window + 1, 0)
        first = tl.maximum(first, needed // N * N)
    SINKS: tl.constexpr = sinks_ptr is not None
    if SPLIT > 0:  # noqa: SIM102  (a constant outside, a value inside)
        if (first >= end) & ((not SINKS) | (split > 0)):  # no key: join_kernel reads no values of this range
            tl.store(lse_ptr + into, tl.full([M], float("-inf"), ACC), real)
            return

    ALIBI: tl.constexpr = slopes_ptr is not None
    q_at, c = row * q_stride + h * q_head_stride, tl.arange(0, DW)
    q = tl.load(q_ptr + q_at[:, None] + c[None, :], real[:, None] & (c < D)[None, :], 0.0)
    scale = tl.full([], 1.0, ACC) * scale_high + scale_low  # a kernel receives floats as fp32; fp64 needs the rest
    slope = tl.zeros([M, 1], ACC)
    if ALIBI:
        slope = (tl.load(slopes_ptr + h, real, 0.0).to(ACC) * LOG2E)[:, None]
    top, total, mixed = tl.full([M], float("-inf"), ACC), tl.zeros([M], ACC), tl.zeros([M, EW], ACC)
    if SINKS:  # noqa: SIM102
        if split == 0:  # a first score with no value
            top = tl.load(sinks_ptr + h, real, 0.0).to(ACC) * LOG2E
            total += 1.0
    for at in tl.range(first, end, N, num_stages=STAGES):
        j = at + tl.arange(0, N)
        there = (j >= needed) & (j < end)
        slot = tl.load(tables_ptr + s.to(tl.int64) * table_stride + j // B, there, 0).to(tl.int64) * B + j % B
        k = _load_keys(k_ptr, slot, g, there, k_block_stride, k_row_stride, k_head_stride, B, D, DW)
        product = tl.dot(q, k.to(q.dtype).T, input_precision="ieee")
        if k_scale_ptr is not None:
            product *= _load_scales(
                k_scale_ptr, slot, g, there, k_scale_block_stride, k_scale_row_stride, k_scale_head_stride, B
            )
        x = score(product, i[:, None], j[None, :], slope, scale, 1.0, False, False, ALIBI)
        if WINDOW:
            x = tl.where((j[None, :] <= i[:, None]) & (i[:, None] - j[None, :] < window), x, float("-inf"))
        elif at + N > lowest + 1:
            x = tl.where((j[None, :] <= i[:, None]) & (j < end)[None, :], x, float("-inf"))
        higher = tl.maximum(top, tl.max(x, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key so far: -inf - -inf is NaN
        kept = tl.exp2(top - base)
        p = tl.exp2(x - base[:, None])
        v = _load_keys(v_ptr, slot, g, there, v_block_stride, v_row_stride, v_head_stride, B, E, EW)
        top, total = higher, total * kept + tl.sum(p, 1)
        if v_scale_ptr is not None:
            p *= _load_scales(
                v_scale_ptr, slot, g, there, v_scale_block_stride, v_scale_row_stride, v_scale_head_stride, B
            )
        mixed = tl.dot(p.to(q.dtype), v.to(q.dtype), mixed * kept[:, None], input_precision="ieee", out_dtype=ACC)

    e, unit = tl.arange(0, EW), 1.0 if SPLIT > 0 else LN2  # join_kernel takes logs of base 2
    tl.store(lse_ptr + into, (top + tl.log2(total)) * unit, real)
    mean = mixed / tl.where(total == 0.0, 1.0, total)[:, None]  # a query without keys has out = 0, lse = -inf
    tl.store(out_ptr + into[:, None] * E + e[None, :], mean, real[:, None] & (e < E)[None, :])


@triton.jit(do_not_specialize=["splits", "rows"])
def join_kernel(
    parts_ptr, part_lse_ptr, out_ptr, lse_ptr, splits, rows, E: tl.constexpr, EW: tl.constexpr, P: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """out and lse of one query head, from the results of its ranges of keys, P at a time."""
    row, e = tl.program_id(0).to(tl.int64), tl.arange(0, EW)
    top, total = tl.full([], float("-inf"), ACC), tl.zeros([], ACC)
    mixed = tl.zeros([EW], ACC)
    for at in range(0, splits, P):
        p = at + tl.arange(0, P)
        source = p.to(tl.int64) * rows + row
        lse = tl.load(part_lse_ptr + source, p < splits, float("-inf"))
        higher = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept, weight = tl.exp2(top - base), tl.exp2(lse - base)
        there = (lse > float("-inf"))[:, None] & (e < E)[None, :]  # a range without keys wrote no values
        parts = tl.load(parts_ptr + source[:, None] * E + e[None, :], there, 0.0)
        mixed = mixed * kept + tl.sum(weight[:, None] * parts, 0)
        top, total = higher, total * kept + tl.sum(weight, 0)
    tl.store(lse_ptr + row, (top + tl.log2(total)) * LN2)
    tl.store(out_ptr + row * E + e, mixed / tl.where(total == 0.0, 1.0, total), e < E)
