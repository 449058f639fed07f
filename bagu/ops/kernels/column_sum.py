"""Sum of the partial weight gradients of all programs. It uses no atomics, so the result is deterministic."""

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.launch import triton_acc
from bagu.ops.kernels.scalars import int64


@triton.jit(do_not_specialize=["P"])
def _column_sum(
    p_ptr, y_ptr, z_ptr, P, N, k_stride, p_stride, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = int64(tl.program_id(1))
    total = tl.zeros([BLOCK_P, BLOCK_N], ACC)
    for start in range(0, P, BLOCK_P):
        p = int64(start) + tl.arange(0, BLOCK_P)
        exists = (p < P)[:, None] & (n < N)[None, :]
        total += tl.load(p_ptr + k * k_stride + p[:, None] * p_stride + n[None, :], exists, 0.0)
    out = y_ptr
    if k > 0:
        out = z_ptr
    tl.store(out + n, tl.sum(total, axis=0), n < N)


def column_sum(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """partial[P, N] summed over P in its own dtype (fp32 or fp64), rounded once to `dtype`. Deterministic."""
    y = torch.empty(partial.shape[-1], dtype=dtype, device=partial.device)
    _launch(partial[None], y, y)
    return y


def column_sums(partial: torch.Tensor, first: torch.dtype, second: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """partial[0] and partial[1] of partial[2, P, N], each summed by `column_sum`; one launch if dtypes are equal."""
    if first != second:
        return column_sum(partial[0], first), column_sum(partial[1], second)
    y, z = (torch.empty(partial.shape[-1], dtype=first, device=partial.device) for _ in range(2))
    _launch(partial, y, z)
    return y, z


def _launch(partial: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    """264 partial sums of 4,096 features are 4 MB: tiles of many rows and few columns request all of it at once."""
    outputs, P, N = partial.shape
    _column_sum[(triton.cdiv(N, 32), outputs)](
        partial, y, z, P, N, partial.stride(0), partial.stride(1),
        BLOCK_P=128, BLOCK_N=32, ACC=triton_acc(partial.dtype), num_warps=8,
    )  # fmt: skip
