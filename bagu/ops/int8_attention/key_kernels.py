"""Keys as int8: the mean of each segment and head is subtracted, then each group of keys is rounded with one scale."""

import triton
import triton.language as tl

from bagu.ops.attention.score_kernels import load_rows, rows_of, work
from bagu.ops.kernels.quantize import inverse_of, magnitude, quantized, scale_of


@triton.jit(do_not_specialize=["tokens", "G"])
def sum_kernel(
    k_ptr, cu_ptr, sums_ptr, tokens, G, k_stride, k_head_stride, D: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add up one of PARTS parts of a segment's keys, into sums[segment, g, part]."""
    segment, g, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.minimum(tl.maximum(tl.load(cu_ptr + segment), 0), tokens)
    end = tl.minimum(tl.load(cu_ptr + segment + 1), tokens)
    size = tl.cdiv(end - begin, PARTS)
    first, end = begin + part * size, tl.minimum(begin + part * size + size, end)
    r, d = tl.arange(0, ROWS), tl.arange(0, D)
    head = k_ptr + g.to(tl.int64) * k_head_stride + d[None, :]
    total = tl.zeros([ROWS, D], ACC)
    for at in tl.range(first, end, ROWS, num_stages=STAGES):
        t = at + r
        total += tl.load(head + t.to(tl.int64)[:, None] * k_stride, (t < end)[:, None], 0.0).to(ACC)
    tl.store(sums_ptr + ((segment * G + g) * PARTS + part) * D + d, tl.sum(total, 0))


@triton.jit(do_not_specialize=["T", "G", "segments"])
def quantize_kernel(
    k_ptr, cu_ptr, sums_ptr, tiles_ptr, k8_ptr, scale_ptr, T, G, segments, k_stride, k_head_stride,
    D: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, SEGMENTS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Round a group of keys of one head, and write its scale to scale[g, t], where t is its first key."""
    g, begin, length, block = work(tiles_ptr)
    if length == 0:
        return
    s, r, d = tl.arange(0, SEGMENTS), tl.arange(0, GROUP), tl.arange(0, D)
    ends = tl.load(cu_ptr + s + 1, s < segments, 2147483647)
    segment = tl.sum((ends <= begin).to(tl.int32))
    there = (block * GROUP + r < length)[:, None]
    k_rows = rows_of(k_ptr, begin, g, length, k_stride, k_head_stride, D, GROUP, D, False)
    k = load_rows(k_rows, block * GROUP, length, k_stride, D, GROUP, D, False).to(ACC)
    parts = ((segment * G + g) * PARTS + tl.arange(0, PARTS))[:, None]
    mean = tl.sum(tl.load(sums_ptr + parts * D + d[None, :]), 0) / length
    k = tl.where(there, k - mean[None, :], 0.0)
    scale = scale_of(tl.max(tl.max(magnitude(k, ACC), 1), 0), 127.0, ACC)
    row = begin + block * GROUP
    tl.store(scale_ptr + g * T + row, scale)
    rows = (row + r)[:, None] * G + g
    tl.store(k8_ptr + rows * D + d[None, :], quantized(k, inverse_of(scale), tl.int8, ACC), there)
