"""The forward kernel: a program loops over the blocks of keys of one block of queries, with the online softmax.

    m' = max(m, max_j s[j])    p[j] = 2^(s[j] - m')    l' = l * 2^(m - m') + sum_j p[j]    o' = o * 2^(m - m') + p V

and at the end out = o / l, lse = ln(2) * (m + log2(l)). A sink is a first score with no value: m = sink, l = 1, o = 0.
"""

import triton
import triton.language as tl

from bagu.ops.attention.score_kernels import (
    LN2,
    LOG2E,
    constants,
    keys_of,
    load_rows,
    rows_of,
    score,
    seen,
    slope_of,
    work,
)


@triton.jit(do_not_specialize=["equal", "H", "per_group", "window"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, slopes_ptr, sinks_ptr, out_ptr, lse_ptr, tiles_ptr, equal, H, per_group, window,
    scale_high, scale_low, cap_high, cap_low, q_stride, k_stride, v_stride, q_head_stride, k_head_stride, v_head_stride,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DW: tl.constexpr, EW: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RAW: tl.constexpr,
    CAP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    h, begin, length, block = work(tiles_ptr, equal, M)
    g = h // per_group
    ALIBI: tl.constexpr = slopes_ptr is not None
    scale, cap = constants(scale_high, scale_low, cap_high, cap_low, ACC)
    slope = slope_of(slopes_ptr, h, ACC)
    i = block * M + tl.arange(0, M)
    q_rows = rows_of(q_ptr, begin, h, length, q_stride, q_head_stride, D, M, DW, TMA)
    k_rows = rows_of(k_ptr, begin, g, length, k_stride, k_head_stride, D, N, DW, TMA)
    v_rows = rows_of(v_ptr, begin, g, length, v_stride, v_head_stride, E, N, EW, TMA)
    q = load_rows(q_rows, block * M, length, q_stride, D, M, DW, TMA)
    if sinks_ptr is None:
        top, total = tl.full([M], float("-inf"), ACC), tl.zeros([M], ACC)
    else:
        top, total = tl.zeros([M], ACC) + tl.load(sinks_ptr + h).to(ACC) * LOG2E, tl.full([M], 1.0, ACC)
    mixed = tl.zeros([M, EW], ACC)

    first, masked_from, end = keys_of(block, length, window, M, N, CAUSAL, WINDOW)
    for at in tl.range(first, end, N, num_stages=STAGES):
        j = at + tl.arange(0, N)
        k = load_rows(k_rows, at, length, k_stride, D, N, DW, TMA)
        product = tl.dot(q, k.T, input_precision="ieee")
        s = score(product, i[:, None], j[None, :], slope, scale, cap, RAW, CAP, ALIBI)
        if at >= masked_from:
            s = tl.where(seen(i[:, None], j[None, :], length, window, CAUSAL, WINDOW), s, float("-inf"))
        high = tl.max(s, 1)
        if RAW:  # 2^(s * scale - m) is one fused multiply-add and one exp2 for each score
            high = high * scale
            s = s * scale
        higher = tl.maximum(top, high)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key so far: -inf - -inf is NaN
        kept = tl.exp2(top - base)
        p = tl.exp2(s - base[:, None])
        v = load_rows(v_rows, at, length, v_stride, E, N, EW, TMA)
        mixed = tl.dot(p.to(v.dtype), v, mixed * kept[:, None], input_precision="ieee", out_dtype=ACC)
        top, total = higher, total * kept + tl.sum(p, 1)

    r, e = tl.arange(0, M), tl.arange(0, EW)
    row = (begin + block * M) * H + h
    mean = mixed / tl.where(total == 0.0, 1.0, total)[:, None]  # a query without keys has out = 0, lse = -inf
    there = (i < length)[:, None] & (e < E)[None, :]
    tl.store(out_ptr + row * E + r[:, None] * (H * E) + e[None, :], mean, there)
    tl.store(lse_ptr + row + r * H, (top + tl.log2(total)) * LN2, i < length)
