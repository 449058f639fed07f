"""QK norm, RoPE and the cache write in one launch: a program has one group of one token, [heads, features].

A head is three parts in registers: the first features a of its pairs, the second ones b, and the features z that are
not rotated. A part may be empty; it is then one masked column. A norm or a scale of 8 bits is a reduction over the
parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.attention.shape import side_by_side
from bagu.ops.kernels.early import start
from bagu.ops.kernels.launch import next_power_of_2, starts_early, triton_acc
from bagu.ops.kernels.quantize import inverse_of, magnitude, quantized, scale_of
from bagu.ops.kernels.scalars import rsqrt
from bagu.ops.kv_write.quantize import LARGEST
from bagu.ops.rope_kv_write.spec import Args

TUNABLE = {"forward": {"num_warps": (1, 4)}}  # the tests run every combination


@triton.jit
def _normed(x, r, q_weight_ptr, k_weight_ptr, c, inside, h, n, EXACT: tl.constexpr, ACC: tl.constexpr):
    """A part of the heads, with queries and key normalized; rounded as the norm op does, unless EXACT."""
    q_weight = tl.load(q_weight_ptr + c, inside, 0.0).to(ACC)
    k_weight = tl.load(k_weight_ptr + c, inside, 0.0).to(ACC)
    y = x.to(ACC) * r * tl.where(h < n, q_weight, k_weight)
    if not EXACT:
        y = y.to(x.dtype).to(ACC)
    return tl.where(h <= n, y, x.to(ACC))


@triton.jit
def _store_head(
    ptr, scale_ptr, h, chosen, a, b, z, first, second, rest, paired, unpaired, stride, LIMIT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Store head `chosen` of the heads h, quantized if there are scales."""
    ptr += 0 * h  # a store needs a pointer for every element
    if scale_ptr is not None:
        top = tl.maximum(tl.max(magnitude(a, ACC), 1), tl.max(magnitude(b, ACC), 1))
        scale = scale_of(tl.maximum(top, tl.max(magnitude(z, ACC), 1))[:, None], LIMIT, ACC)
        tl.store(scale_ptr + 0 * h, scale, h == chosen)
        inverse = inverse_of(scale)
        a = quantized(a, inverse, ptr.dtype.element_ty, ACC)
        b = quantized(b, inverse, ptr.dtype.element_ty, ACC)
        z = quantized(z, inverse, ptr.dtype.element_ty, ACC)
    tl.store(ptr + first * stride, a, (h == chosen) & paired)
    tl.store(ptr + second * stride, b, (h == chosen) & paired)
    tl.store(ptr + rest * stride, z, (h == chosen) & unpaired)


@triton.jit
def _kernel(
    qkv_ptr, slots_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, out_ptr,
    n, eps, t_stride, g_stride, head_stride, k_block_stride, k_row_stride, k_head_stride, k_stride, v_block_stride,
    v_row_stride, v_head_stride, v_stride, k_scale_block_stride, k_scale_row_stride, k_scale_head_stride,
    v_scale_block_stride, v_scale_row_stride, v_scale_head_stride, B: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, LIMIT: tl.constexpr,
    ACC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start(EARLY)
    t, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + t)
    h = tl.arange(0, HEADS)[:, None]  # query heads, the key, the value
    pair, rest = tl.arange(0, PAIRS)[None, :], 2 * R + tl.arange(0, REST)[None, :]
    paired, unpaired = pair < R, rest < D
    first, second = (2 * pair, 2 * pair + 1) if INTERLEAVED else (pair, R + pair)
    heads = qkv_ptr + t * t_stride + g * g_stride + h.to(tl.int64) * head_stride
    a = tl.load(heads + first, (h < n + 2) & paired, 0.0)
    b = tl.load(heads + second, (h < n + 2) & paired, 0.0)
    z = tl.load(heads + rest, (h < n + 2) & unpaired, 0.0)
    if q_weight_ptr is not None:
        EXACT: tl.constexpr = k_scale_ptr is not None
        squares = tl.sum(a.to(ACC) * a.to(ACC), 1) + tl.sum(b.to(ACC) * b.to(ACC), 1)
        r = rsqrt((squares + tl.sum(z.to(ACC) * z.to(ACC), 1)) * (1.0 / D) + eps)[:, None]
        a = _normed(a, r, q_weight_ptr, k_weight_ptr, first, paired, h, n, EXACT, ACC)
        b = _normed(b, r, q_weight_ptr, k_weight_ptr, second, paired, h, n, EXACT, ACC)
        z = _normed(z, r, q_weight_ptr, k_weight_ptr, rest, unpaired, h, n, EXACT, ACC)
    a, b, z = a.to(ACC), b.to(ACC), z.to(ACC)
    if cos_ptr is not None:
        cos = tl.load(cos_ptr + t * R + pair, paired, 0.0).to(ACC)
        sin = tl.load(sin_ptr + t * R + pair, paired, 0.0).to(ACC)
        turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
        a, b = tl.where(h <= n, turned_a, a), tl.where(h <= n, turned_b, b)
    out = out_ptr + ((t * tl.num_programs(1) + g) * n + h) * D
    tl.store(out + first, a, (h < n) & paired)
    tl.store(out + second, b, (h < n) & paired)
    tl.store(out + rest, z, (h < n) & unpaired)

    block, place = slot // B, slot % B
    keys = k_ptr + block * k_block_stride + place * k_row_stride + g * k_head_stride
    values = v_ptr + block * v_block_stride + place * v_row_stride + g * v_head_stride
    if k_scale_ptr is not None:
        k_scale_ptr += block * k_scale_block_stride + place * k_scale_row_stride + g * k_scale_head_stride
        v_scale_ptr += block * v_scale_block_stride + place * v_scale_row_stride + g * v_scale_head_stride
    _store_head(keys, k_scale_ptr, h, n, a, b, z, first, second, rest, paired, unpaired, k_stride, LIMIT, ACC)
    _store_head(values, v_scale_ptr, h, n + 1, a, b, z, first, second, rest, paired, unpaired, v_stride, LIMIT, ACC)


def forward(a: Args, *, num_warps: int | None = None) -> tuple[torch.Tensor]:
    qkv, k_cache, cos, sin, q_weight, k_weight = a.qkv, a.k_cache, a.cos, a.sin, a.q_weight, a.k_weight
    (T, G, C, D), B = qkv.shape, k_cache.shape[1]
    q = qkv.new_empty(T, G * (C - 2), D)
    if T == 0:
        return (q,)
    qkv = side_by_side(qkv)
    cos, sin, q_weight, k_weight = (None if x is None else x.contiguous() for x in (cos, sin, q_weight, k_weight))
    R, heads = 0 if cos is None else cos.shape[1], next_power_of_2(C)
    k_steps = (0, 0, 0) if a.k_scale is None else a.k_scale.stride()
    v_steps = (0, 0, 0) if a.v_scale is None else a.v_scale.stride()
    early = starts_early(qkv.device, rows=T)
    _kernel[(T, G)](
        qkv, a.slots.contiguous(), k_cache, a.v_cache, a.k_scale, a.v_scale, cos, sin, q_weight, k_weight, q, C - 2,
        a.eps, qkv.stride(0), qkv.stride(1), qkv.stride(2), *k_cache.stride(), *a.v_cache.stride(), *k_steps, *v_steps,
        B=B, D=D, R=R, HEADS=heads, PAIRS=next_power_of_2(R), REST=next_power_of_2(D - 2 * R),
        INTERLEAVED=a.layout == "interleaved", LIMIT=LARGEST.get(k_cache.dtype, 1.0), ACC=triton_acc(qkv.dtype),
        EARLY=early, num_warps=num_warps or max(1, min(8, heads * next_power_of_2(D) // 512)), launch_pdl=early,
    )  # fmt: skip
    return (q,)
