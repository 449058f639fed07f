"""The attention kernel over int8 queries and keys: a program loops over the blocks of keys of one block of queries.

It is `attention`'s forward kernel with another product. A query is rounded to int8 when it is loaded, with a scale of
its own, and its product with int8 keys is an exact int32. Scores in base 2 are this product times `step`, the scale of
the query times that of the block of keys times log2(e) / sqrt(D): a number per row, which costs no instruction per
score, because 2^(s * step - m) is one fused multiply-add and one exp2 as before. The weights are multiplied by the
values in the dtype of the values.
"""

import triton
import triton.language as tl

from bagu.ops.attention.score_kernels import keys_of, load_rows, rows_of, seen, work
from bagu.ops.kernels.quantize import inverse_of, magnitude, quantized, scale_of


@triton.jit
def above_zero(step):
    """step, or 1e-30 if it is smaller: the step of zeros is 0, and -inf, a hidden key's score, times 0 is NaN."""
    return tl.where(step < 1e-30, 1e-30, step)


@triton.jit(do_not_specialize=["T", "H", "per_group"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, out_ptr, tiles_ptr, T, H, per_group, scale_high, scale_low, q_stride,
    k_stride, v_stride, q_head_stride, k_head_stride, v_head_stride,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    h, begin, length, block = work(tiles_ptr)
    g = h // per_group
    i = block * M + tl.arange(0, M)
    q_rows = rows_of(q_ptr, begin, h, length, q_stride, q_head_stride, D, M, D, False)
    k_rows = rows_of(k_ptr, begin, g, length, k_stride, k_head_stride, D, N, D, False)
    v_rows = rows_of(v_ptr, begin, g, length, v_stride, v_head_stride, D, N, D, False)
    k_scales = k_scale_ptr + g * T + begin
    q = load_rows(q_rows, block * M, length, q_stride, D, M, D, False)
    q_scale = scale_of(tl.max(magnitude(q, ACC), 1), 127.0, ACC)
    q = quantized(q, inverse_of(q_scale)[:, None], tl.int8, ACC)
    q_scale = q_scale * (tl.full([], 1.0, ACC) * scale_high + scale_low)  # a kernel receives floats as fp32
    top, total = tl.full([M], float("-inf"), ACC), tl.zeros([M], ACC)
    mixed = tl.zeros([M, D], ACC)

    first, masked_from, end = keys_of(block, length, 0, M, N, CAUSAL, False)
    for at in tl.range(first, end, N, num_stages=STAGES):
        j = at + tl.arange(0, N)
        k = load_rows(k_rows, at, length, k_stride, D, N, D, False)
        step = above_zero(q_scale * tl.load(k_scales + at // GROUP * GROUP))
        s = tl.dot(q, k.T, out_dtype=tl.int32).to(ACC)
        if at >= masked_from:
            s = tl.where(seen(i[:, None], j[None, :], length, 0, CAUSAL, False), s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1) * step)
        kept = tl.exp2(top - higher)
        p = tl.exp2(s * step[:, None] - higher[:, None])
        v = load_rows(v_rows, at, length, v_stride, D, N, D, False)
        mixed = tl.dot(p.to(v.dtype), v, mixed * kept[:, None], input_precision="ieee", out_dtype=ACC)
        top, total = higher, total * kept + tl.sum(p, 1)

    r, d = tl.arange(0, M), tl.arange(0, D)
    row = (begin + block * M) * H + h
    tl.store(out_ptr + row * D + r[:, None] * (H * D) + d[None, :], mixed / total[:, None], (i < length)[:, None])
