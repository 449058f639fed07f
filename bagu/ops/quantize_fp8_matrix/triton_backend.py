"""Quantization of a matrix to fp8 on Triton: memory is the limit, at 6 bytes per bf16 number, 4 if `amax` is given.

In a first launch each of a few programs writes its largest |x|. Each program of the second launch reduces these,
quantizes a tile and its transpose, and writes both. It starts at the end of x, which may still be in the L2 after the
first launch.

The tile of x is transposed, not that of q: where the bytes of fp8 values go through shared memory, ptxas (of Triton 3.6
and 3.7) moves the read of every second byte before the conversion that writes it. The compiler transposes q all the
same if x has more than 16 bits, and there a third launch does it.
"""

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.launch import as_rows, next_power_of_2, num_sms, triton_acc
from bagu.ops.kernels.quantize import inverse_of, quantized, scale_of
from bagu.ops.quantize_int8.triton_backend import tensor_top
from bagu.ops.transpose.triton_backend import forward as transpose

TUNABLE = {"forward": {"rows": (64, 128), "columns": (64, 128), "num_warps": (4, 8)}}  # the tests run every combination


@triton.jit
def _both(
    x_ptr, top_ptr, q_ptr, t_ptr, scale_ptr, P, M, K, x_stride, LARGEST: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """Quantize a tile, the last one first, by the scale computed from the P maxima."""
    across = tl.cdiv(K, BLOCK_K)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    m = (tile // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = (tile % across).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + m[:, None] * x_stride + k[None, :], (m < M)[:, None] & (k < K)[None, :], 0.0)
    p = tl.arange(0, BLOCK_P)
    scale = scale_of(tl.max(tl.load(top_ptr + p, p < P, 0), axis=0), LARGEST, ACC)
    tl.store(scale_ptr, scale, tile == 0)
    inverse = inverse_of(scale)
    q = quantized(x, inverse, q_ptr.dtype.element_ty, ACC)
    tl.store(q_ptr + m[:, None] * K + k[None, :], q, (m < M)[:, None] & (k < K)[None, :])
    if BOTH:
        t = quantized(tl.trans(x), inverse, q_ptr.dtype.element_ty, ACC)
        tl.store(t_ptr + k[:, None] * M + m[None, :], t, (k < K)[:, None] & (m < M)[None, :])


def forward(
    x: torch.Tensor,
    amax: torch.Tensor | None,
    dtype: str,
    *,
    rows: int | None = None,
    columns: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rows` and `columns` are the sides of a tile."""
    (M, K), acc, to = x.shape, triton_acc(x.dtype), getattr(torch, dtype)
    bits, kept = (torch.int64, torch.float64) if x.dtype == torch.float64 else (torch.int32, torch.float32)
    q, t = torch.empty(M, K, dtype=to, device=x.device), torch.empty(K, M, dtype=to, device=x.device)
    if not x.numel():
        return q, t, torch.zeros((), dtype=kept, device=x.device)
    scale, x = torch.empty((), dtype=kept, device=x.device), as_rows(x)
    top = _maxima(x, bits) if amax is None else amax.contiguous().view(bits)
    block_m, block_k, narrow = rows or 128, columns or 128, x.element_size() == 2
    _both[(triton.cdiv(M, block_m) * triton.cdiv(K, block_k),)](
        x, top, q, t, scale, len(top), M, K, x.stride(0), torch.finfo(to).max,
        BLOCK_P=next_power_of_2(len(top)), BLOCK_M=block_m, BLOCK_K=block_k, ACC=acc, BOTH=narrow,
        num_warps=num_warps or 8,
    )  # fmt: skip
    return q, t if narrow else transpose(q, 0, 1)[0], scale


def _maxima(x: torch.Tensor, bits: torch.dtype) -> torch.Tensor:
    """The largest |x| of what each program reads, as integers (kernels/quantize.py)."""
    M, K = x.shape
    block_k = min(next_power_of_2(K), 2048)
    block_m = 8192 // block_k
    tiles = triton.cdiv(M, block_m) * triton.cdiv(K, block_k)
    top = torch.empty(min(tiles, 4 * num_sms(x.device)), dtype=bits, device=x.device)
    tensor_top[(len(top),)](
        x, top, M, K, x.stride(0), tiles,
        BLOCK_M=block_m, BLOCK_N=block_k, ACC=triton_acc(x.dtype), STAGES=3, num_warps=8,
    )  # fmt: skip
    return top
