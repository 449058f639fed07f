"""Triton code that several ops share: 64-bit indices, and the sum over programs that ends a weight gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.launch import triton_acc

__all__ = ["column_sum", "column_sums", "int64", "reciprocal", "rsqrt", "split_row"]


@triton.jit
def int64(i):
    """A loop counter as a 64-bit offset; in the interpreter it is a Python int and has no `.to`."""
    return tl.zeros([], tl.int64) + i


@triton.jit
def reciprocal(N, ACC: tl.constexpr):
    """1 / N in ACC, rounded to nearest. Taken before the row arrives, it keeps the slow division off the row's path."""
    n = tl.zeros([], ACC) + N
    if n.dtype == tl.float32:
        return tl.div_rn(1.0, n)
    else:
        return 1.0 / n


@triton.jit
def rsqrt(x):
    """1 / sqrt(x) within an ulp. The approximate one is 2 off, the same way in a whole row; a Newton step mends that.

    A correctly rounded division here cost LayerNorm a tenth of its speed on an H200: every row waits for it.
    """
    if x.dtype == tl.float32:
        r = tl.rsqrt(x)
        return tl.where((x > 0.0) & (x < float("inf")), r + r * (0.5 - 0.5 * (x * r) * r), r)
    else:
        return 1.0 / tl.sqrt(x)


@triton.jit
def split_row(row, N, VEC: tl.constexpr):
    """Cut a contiguous row at `row` (int64 offset) of N elements into an aligned body and its two ends.

    Returns (start, body, head): the body is [start, start + body), a multiple of VEC elements on a 16-byte boundary,
    so it is read and written 128 bits at a time whatever N is; `head` elements stand before it, and fewer than VEC
    after it. Without this, a row of 4,095 bf16 moves 16 bits at a time (0.70 of copy bandwidth on an H200, not 0.92).
    """
    head = ((VEC - row % VEC) % VEC).to(tl.int32)
    head = tl.minimum(head, N)
    body = (N - head) // VEC * VEC
    return tl.multiple_of(row + head, VEC), tl.multiple_of(body, VEC), head


@triton.jit(do_not_specialize=["P"])
def _column_sum(p_ptr, y_ptr, z_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = int64(tl.program_id(1))
    total = tl.zeros([BLOCK_P, BLOCK_N], ACC)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        real = (p < P)[:, None] & (n < N)[None, :]
        total += tl.load(p_ptr + (k * P + p[:, None]) * N + n[None, :], real, 0.0)
    out = y_ptr
    if k > 0:
        out = z_ptr
    tl.store(out + n, tl.sum(total, axis=0), n < N)


def column_sum(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """partial[P, N] summed over P in its own dtype (fp32 or fp64), rounded once to `dtype`. Deterministic."""
    y = torch.empty(partial.shape[-1], dtype=dtype, device=partial.device)
    _launch(partial, y, y, 1)
    return y


def column_sums(partial: torch.Tensor, first: torch.dtype, second: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Both of partial[2, P, N] as `column_sum` would; in one launch where they have one dtype."""
    if first != second:
        return column_sum(partial[0], first), column_sum(partial[1], second)
    y, z = (torch.empty(partial.shape[-1], dtype=first, device=partial.device) for _ in range(2))
    _launch(partial, y, z, 2)
    return y, z


def _launch(partial: torch.Tensor, y: torch.Tensor, z: torch.Tensor, outputs: int) -> None:
    """264 programs' sums of 4,096 features are 4 MB: to ask for them at once, a program has few columns, many rows."""
    P, N = partial.shape[-2:]
    _column_sum[(triton.cdiv(N, 32), outputs)](
        partial, y, z, P, N, BLOCK_P=128, BLOCK_N=32, ACC=triton_acc(partial.dtype), num_warps=8
    )
