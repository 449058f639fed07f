"""The backward in two kernels: dq, then dk and dv. They use no atomics, so results are deterministic.

    P = 2^(S - lse)    dV = P^T dO    dP = dO V^T    dS = P * (dP - delta)    dQ = scale * dS K    dK = scale * dS^T Q

where delta[i] = dO[i] . out[i] = sum_j P[i, j] * dP[i, j]. P is never stored: both
kernels recompute it from q, k and lse. That takes seven products; five would be enough with sums across programs.

A sink has no value, so its gradient is -sum_i 2^(sink - lse[i]) * delta[i] (triton_backend.py).
"""

import triton
import triton.language as tl

from bagu.ops.attention.score_kernels import (
    LN2,
    LOG2E,
    cap_slope,
    constants,
    heads_of,
    keys_of,
    load_head,
    load_rows,
    rows_of,
    score,
    seen,
    slope_of,
    work,
)


@triton.jit(do_not_specialize=["equal", "T", "H", "per_group", "window"])
def dq_kernel(
    q_ptr, k_ptr, v_ptr, slopes_ptr, dout_ptr, out_ptr, lse_ptr, dq_ptr, stats_ptr, tiles_ptr, equal, T, H,
    per_group, window, scale_high, scale_low, cap_high, cap_low, q_stride, k_stride, v_stride, dout_stride,
    out_stride, q_head_stride, k_head_stride, v_head_stride, dout_head_stride, out_head_stride, dq_stride,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DW: tl.constexpr, EW: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RAW: tl.constexpr,
    CAP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of queries from all keys that it attends to.

    Also store delta and log2(e) * lse as [H, T], so that `dkdv_kernel` reads contiguous blocks of them. A query that
    attends to no key has lse = -inf; +inf is stored for it, which makes its P zero.
    """
    h, begin, length, block = work(tiles_ptr, equal, M)
    g = h // per_group
    ALIBI: tl.constexpr = slopes_ptr is not None
    scale, cap = constants(scale_high, scale_low, cap_high, cap_low, ACC)
    slope = slope_of(slopes_ptr, h, ACC)
    r = tl.arange(0, M)
    i = block * M + r
    q_rows = rows_of(q_ptr, begin, h, length, q_stride, q_head_stride, D, M, DW, TMA)
    do_rows = rows_of(dout_ptr, begin, h, length, dout_stride, dout_head_stride, E, M, EW, TMA)
    k_rows = rows_of(k_ptr, begin, g, length, k_stride, k_head_stride, D, N, DW, TMA)
    v_rows = rows_of(v_ptr, begin, g, length, v_stride, v_head_stride, E, N, EW, TMA)
    o_rows = rows_of(out_ptr, begin, h, length, out_stride, out_head_stride, E, M, EW, False)
    q = load_rows(q_rows, block * M, length, q_stride, D, M, DW, TMA)
    do = load_rows(do_rows, block * M, length, dout_stride, E, M, EW, TMA)
    o = load_rows(o_rows, block * M, length, out_stride, E, M, EW, False)
    row = (begin + block * M) * H + h
    lse = tl.load(lse_ptr + row + r * H, i < length, 0.0)
    log2 = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
    delta = tl.sum(o.to(ACC) * do.to(ACC), 1)
    stats = 2 * (h * T + begin + i)
    tl.store(stats_ptr + stats, log2, i < length)
    tl.store(stats_ptr + stats + 1, delta, i < length)
    dq = tl.zeros([M, DW], ACC)

    first, masked_from, end = keys_of(block, length, window, M, N, CAUSAL, WINDOW)
    for at in tl.range(first, end, N, num_stages=STAGES):
        j = at + tl.arange(0, N)
        k = load_rows(k_rows, at, length, k_stride, D, N, DW, TMA)
        v = load_rows(v_rows, at, length, v_stride, E, N, EW, TMA)
        product = tl.dot(q, k.T, input_precision="ieee")
        dp = tl.dot(do, v.T, input_precision="ieee")  # before the softmax: faster for heads of 128 and more
        s = score(product, i[:, None], j[None, :], slope, scale, cap, RAW, CAP, ALIBI)
        if RAW:
            s = s * scale
        p = tl.exp2(s - log2[:, None])
        if at >= masked_from:
            p = tl.where(seen(i[:, None], j[None, :], length, window, CAUSAL, WINDOW), p, 0.0)
        ds = p * (dp - delta[:, None])
        if CAP:
            ds = ds * cap_slope(product, scale)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee", out_dtype=ACC)

    dq = dq * (scale * cap * LN2)
    d = tl.arange(0, DW)
    dq_ptr += (begin + block * M) * dq_stride + h * D
    tl.store(dq_ptr + r[:, None] * dq_stride + d[None, :], dq, (i < length)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["equal", "T", "G", "per_group", "window"])
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, slopes_ptr, dout_ptr, stats_ptr, dk_ptr, dv_ptr, tiles_ptr, equal, T, G, per_group,
    window, scale_high, scale_low, cap_high, cap_low, q_stride, k_stride, v_stride, dout_stride, q_head_stride,
    k_head_stride, v_head_stride, dout_head_stride, dk_stride, dv_stride,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DW: tl.constexpr, EW: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RAW: tl.constexpr,
    CAP: tl.constexpr, ACC: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a block of keys from all queries that attend to it, in all heads that share it.

    Scores are transposed, so that P and dS are operands in registers. Blocks on the diagonal are masked inside the one
    loop: a second loop makes the compiler spill, which costs more (journal 004).
    """
    g, begin, length, block = work(tiles_ptr, equal, N)
    ALIBI: tl.constexpr = slopes_ptr is not None
    scale, cap = constants(scale_high, scale_low, cap_high, cap_low, ACC)
    j = block * N + tl.arange(0, N)
    k_rows = rows_of(k_ptr, begin, g, length, k_stride, k_head_stride, D, N, DW, TMA)
    v_rows = rows_of(v_ptr, begin, g, length, v_stride, v_head_stride, E, N, EW, TMA)
    k = load_rows(k_rows, block * N, length, k_stride, D, N, DW, TMA)
    v = load_rows(v_rows, block * N, length, v_stride, E, N, EW, TMA)
    dk, dv = tl.zeros([N, DW], ACC), tl.zeros([N, EW], ACC)

    first, end = 0, length
    if CAUSAL:
        first = block * N // M * M
    if WINDOW:
        end = tl.minimum(block * N + N - 1 + window, length)
        if not CAUSAL:
            first = tl.maximum(block * N - window + 1, 0) // M * M
    q_heads = heads_of(q_ptr, begin, g * per_group, per_group, length, q_stride, q_head_stride, D, M, DW, TMA)
    do_heads = heads_of(dout_ptr, begin, g * per_group, per_group, length, dout_stride, dout_head_stride, E, M, EW, TMA)
    stats_ptr += 2 * (g * per_group * T + begin)
    blocks = tl.cdiv(end - first, M)
    # One loop over heads and blocks: a nested loop makes the compiler spill. The head and the block are carried: a
    # division in the loop takes 9 % of the kernel's time (journal 004).
    n, at = 0, first
    for _ in tl.range(0, per_group * blocks, num_stages=STAGES):
        i = at + tl.arange(0, M)
        slope = slope_of(slopes_ptr, g * per_group + n, ACC)
        q = load_head(q_heads, at, n, length, q_stride, q_head_stride, D, M, DW, TMA)
        # One load of contiguous pairs is pipelined; two loads of 64 values each compiled to 73 scalar loads. Beyond the
        # segment's end q, dout, log2 and delta are 0, which adds 0 to dk and dv.
        pair = tl.arange(0, 2 * M)
        stats = tl.load(stats_ptr + (n * T + at) * 2 + pair, pair < 2 * (length - at), 0.0)
        log2, delta = tl.split(stats.reshape([M, 2]))
        product = tl.dot(k, q.T, input_precision="ieee")
        s = score(product, i[None, :], j[:, None], slope, scale, cap, RAW, CAP, ALIBI)
        if RAW:
            s = s * scale
        p = tl.exp2(s - log2[None, :])
        if WINDOW or (CAUSAL and at < block * N + N):
            p = tl.where(seen(i[None, :], j[:, None], length, window, CAUSAL, WINDOW), p, 0.0)
        do = load_head(do_heads, at, n, length, dout_stride, dout_head_stride, E, M, EW, TMA)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee", out_dtype=ACC)
        ds = p * (tl.dot(v, do.T, input_precision="ieee") - delta[None, :])
        if CAP:
            ds = ds * cap_slope(product, scale)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee", out_dtype=ACC)
        at += M
        if GROUPED:
            n, at = tl.where(at < end, n, n + 1), tl.where(at < end, at, first)

    dk = dk * (scale * cap * LN2)
    r, d, e = tl.arange(0, N), tl.arange(0, DW), tl.arange(0, EW)
    dk_ptr += (begin + block * N) * dk_stride + g * D
    dv_ptr += (begin + block * N) * dv_stride + g * E
    tl.store(dk_ptr + r[:, None] * dk_stride + d[None, :], dk, (j < length)[:, None] & (d < D)[None, :])
    tl.store(dv_ptr + r[:, None] * dv_stride + e[None, :], dv, (j < length)[:, None] & (e < E)[None, :])
