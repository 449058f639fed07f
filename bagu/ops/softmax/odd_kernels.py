"""Softmax of contiguous rows that begin anywhere, N being odd or nearly: one program a row.

A row is an aligned body, which moves 128 bits at a time, and its two ends, at most 2 * VEC values (see `apart`).
The body's block is that of N less what is no whole vector: 4,096 for 4,097 columns. Sums are scalars, so that a body
and its ends need no common layout: as [1, 1] tiles they made Triton load the ends twice, and 0.73 of copy bandwidth.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from bagu.ops.kernels import apart, int64
from bagu.ops.launch import blocks, triton_acc, vector

__all__ = ["odd_backward", "odd_cut", "odd_forward", "registers"]


@triton.jit
def _forward(
    x_ptr, y_ptr, N, c_high, c_low,
    SIGN: tl.constexpr, BLOCK_N: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row, n = int64(tl.program_id(0)), tl.arange(0, BLOCK_N)[None, :]
    head, body, at, end = apart(row, N, BLOCK_N, 2 * VEC, VEC)
    first, start, real = row * N, tl.multiple_of(row * N + head, VEC), n < body
    other = -float("inf") if SIGN >= 0 else float("inf")
    x = tl.load(x_ptr + start + n, real, other, eviction_policy="evict_last").to(ACC)
    ends = tl.load(x_ptr + first + at, end, other, eviction_policy="evict_last").to(ACC)
    if SIGN < 0:
        x, ends = -x, -ends
    c = tl.zeros([], ACC) + c_high + c_low
    peak = tl.maximum(tl.max(x), tl.max(ends))  # it drops a NaN, the sum does not
    x, ends = tl.exp2((x - peak) * c), tl.exp2((ends - peak) * c)
    if SIGN == 0:
        x, ends = tl.where(real, x, 0.0), tl.where(end, ends, 0.0)
    r = 1.0 / (tl.sum(x) + tl.sum(ends))
    tl.store(y_ptr + start + n, x * r, real)
    tl.store(y_ptr + first + at, ends * r, end)


@triton.jit
def _backward(
    dy_ptr, y_ptr, dx_ptr, N, scale, scale_low,
    BLOCK_N: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row, n = int64(tl.program_id(0)), tl.arange(0, BLOCK_N)[None, :]
    head, body, at, end = apart(row, N, BLOCK_N, 2 * VEC, VEC)
    first, start, real = row * N, tl.multiple_of(row * N + head, VEC), n < body
    y = tl.load(y_ptr + start + n, real, 0.0, eviction_policy="evict_last").to(ACC)
    dy = tl.load(dy_ptr + start + n, real, 0.0, eviction_policy="evict_last").to(ACC)
    y_ends = tl.load(y_ptr + first + at, end, 0.0, eviction_policy="evict_last").to(ACC)
    dy_ends = tl.load(dy_ptr + first + at, end, 0.0, eviction_policy="evict_last").to(ACC)
    dy, dy_ends = tl.where(y != 0, dy, 0.0), tl.where(y_ends != 0, dy_ends, 0.0)
    mass = tl.sum(y) + tl.sum(y_ends)
    mean = (tl.sum(dy * y) + tl.sum(dy_ends * y_ends)) / mass
    factor = tl.zeros([], ACC) + scale + scale_low
    tl.store(dx_ptr + start + n, tl.where(y != 0, factor * y * (dy - mean), 0.0), real)
    tl.store(dx_ptr + first + at, tl.where(y_ends != 0, factor * y_ends * (dy_ends - mean), 0.0), end)


def registers(block: int, warps: int) -> int:
    """A thread's in a backward: 64 for 16 values of y and of dy, so that two rows of 8,192 share a multiprocessor.

    ptxas would take 77, and one runs: 0.73 of copy bandwidth instead of 0.94. In proportion for more values, as far as
    there are registers.
    """
    return min(64 * max(block // (512 * warps), 1), 65536 // (32 * warps), 255)


def _options(rows: torch.Tensor, cut: tuple[int, int], per_warp: int, num_warps: int | None) -> dict[str, Any]:
    vec, block = cut
    warps = num_warps or min(max(block // per_warp, 1), 16)
    return {"BLOCK_N": block, "VEC": vec, "ACC": triton_acc(rows.dtype), "num_warps": warps}


def odd_cut(a: torch.Tensor, b: torch.Tensor, whole: int) -> tuple[int, int] | None:
    """VEC and BLOCK_N of rows that begin anywhere and are worth a program each, if these are so; shorter share one."""
    vec, N = vector(a, b), a.shape[1]
    return (vec, block) if vec and N >= 512 and (block := blocks(N, vec)[0]) <= whole else None


def odd_forward(
    x: torch.Tensor, y: torch.Tensor, c: tuple[float, float], sign: int, cut: tuple[int, int], num_warps: int | None
) -> None:
    """Write y of x[M, N]."""
    _forward[(len(x),)](x, y, x.shape[1], *c, SIGN=sign, **_options(x, cut, 1024, num_warps))


def odd_backward(
    dy: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, scale: tuple[float, float], cut: tuple[int, int],
    num_warps: int | None,
) -> None:  # fmt: skip
    """Write dx for dy and y[M, N]."""
    options = _options(y, cut, 512, num_warps)
    most = registers(options["BLOCK_N"] * max(y.element_size() // 4, 1), options["num_warps"])
    _backward[(len(y),)](dy, y, dx, y.shape[1], *scale, maxnreg=most, **options)
