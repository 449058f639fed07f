"""Triton code that several ops share: 64-bit indices, and the sum over programs that ends a weight gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.launch import triton_acc

__all__ = ["column_sum", "int64"]


@triton.jit
def int64(i):
    """A loop counter as a 64-bit offset; in the interpreter it is a Python int and has no `.to`."""
    return tl.zeros([], tl.int64) + i


@triton.jit
def _column_sum(p_ptr, y_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_P, BLOCK_N], ACC)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        real = (p < P)[:, None] & (n < N)[None, :]
        total += tl.load(p_ptr + p[:, None].to(tl.int64) * N + n[None, :], real, 0.0)
    tl.store(y_ptr + n, tl.sum(total, axis=0), n < N)


def column_sum(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """partial[P, N] summed over P in its own dtype (fp32 or fp64), rounded once to `dtype`. Deterministic."""
    P, N = partial.shape
    y = torch.empty(N, dtype=dtype, device=partial.device)
    _column_sum[(triton.cdiv(N, 64),)](
        partial, y, P, N, BLOCK_P=32, BLOCK_N=64, ACC=triton_acc(partial.dtype), num_warps=4
    )
    return y
