"""Gumbel-softmax on Triton: one program owns whole rows and makes their noise; no tensor of noise is kept.

Arithmetic is the limit, not memory: an element takes a quarter of a Philox call (about 20 integer operations) and two
logs. So the four words of a call go to four neighbours, and the backward keeps two numbers a row (the largest z and
the sum of exponentials under it) and draws the noise again, rather than keep a second tensor. A row is a block and a
tail. A short tail has its z made before, for all rows at once; a row past WHOLE and its tail is walked (wide_kernels).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from bagu.ops.gumbel_softmax.wide_kernels import noisy, wide_backward, wide_forward
from bagu.ops.launch import as_rows, blocks, fp32_pair, triton_acc
from bagu.ops.signature import accumulator

WHOLE = 8192  # the longest block kept in registers: 16 values and their noise a thread; half as much may be past it
MOST = 2  # a tail is at most half of its block
TUNABLE = {  # tests run each point
    "forward": {"block_m": (1, 4), "num_warps": (4, 8)},
    "backward": {"block_m": (1, 4), "num_warps": (4, 8)},
}


@triton.jit
def _real(m, n, M, N, TAIL: tl.constexpr):
    """Which of rows m and columns n there are; of a block with a tail every column."""
    if TAIL:
        return m < M
    else:
        return (m < M) & (n < N)


@triton.jit
def _share(z, top, total, first, n, HARD: tl.constexpr):
    """y of the columns n, from the row's largest z, its sum of exponentials and the first column of the largest."""
    if HARD:
        return tl.where(n == first[:, None], 1.0, 0.0) + (total - total)[:, None]  # + NaN in a row of NaN
    else:
        return tl.exp2((z - top[:, None]) * 1.4426950408889634) * (1.0 / total)[:, None]


@triton.jit(do_not_specialize=["seed"])
def _tails(
    x_ptr, z_ptr, M, N, x_stride, cool, cool_low, seed,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """z[M, TAIL] of the columns past BLOCK_N, -inf past N: of many rows a program, which leaves no thread idle."""
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    _, z = _tail(None, x_ptr, m, M, N, x_stride, cool, cool_low, seed, BLOCK_N, TAIL, ACC)
    tl.store(z_ptr + m * TAIL + tl.arange(0, TAIL)[None, :], z, m < M)


@triton.jit
def _tail(
    z_ptr, x_ptr, m, M, N, x_stride, cool, cool_low, seed, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, ACC: tl.constexpr
):
    """The TAIL columns past the block and their z: made before (z_ptr), or here."""
    e = tl.arange(0, TAIL)[None, :]
    if z_ptr is not None:
        z = tl.load(z_ptr + m * TAIL + e, m < M, -float("inf"))
    else:
        group = BLOCK_N // 4 + tl.arange(0, TAIL // 4)[None, :]
        z = noisy(x_ptr, m, BLOCK_N + e, group, (m < M) & (BLOCK_N + e < N), x_stride, cool, cool_low, seed, ACC)
    return BLOCK_N + e, z


@triton.jit(do_not_specialize=["seed"])
def _forward(
    x_ptr, z_ptr, y_ptr, top_ptr, total_ptr, M, N, x_stride, cool, cool_low, seed,
    HARD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    m, n, group = rows[:, None], tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_N // 4)[None, :]
    real = _real(m, n, M, N, TAIL)
    z = noisy(x_ptr, m, n, group, real, x_stride, cool, cool_low, seed, ACC)
    top = tl.max(z, axis=1)
    if TAIL:
        n_tail, z_tail = _tail(z_ptr, x_ptr, m, M, N, x_stride, cool, cool_low, seed, BLOCK_N, TAIL, ACC)
        top = tl.maximum(top, tl.max(z_tail, axis=1))
    total = tl.sum(tl.exp2((z - top[:, None]) * 1.4426950408889634), axis=1)
    first = tl.min(tl.where(z == top[:, None], n, N), axis=1)
    if TAIL:
        total += tl.sum(tl.exp2((z_tail - top[:, None]) * 1.4426950408889634), axis=1)
        first = tl.minimum(first, tl.min(tl.where(z_tail == top[:, None], n_tail, N), axis=1))
    tl.store(top_ptr + rows, top, rows < M)
    tl.store(total_ptr + rows, total, rows < M)
    tl.store(y_ptr + m * N + n, _share(z, top, total, first, n, HARD), real)
    if TAIL:
        tl.store(y_ptr + m * N + n_tail, _share(z_tail, top, total, first, n_tail, HARD), (m < M) & (n_tail < N))


@triton.jit(do_not_specialize=["seed"])
def _backward(
    dy_ptr, x_ptr, z_ptr, top_ptr, total_ptr, dx_ptr, M, N, dy_stride, x_stride, cool, cool_low, seed,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    m, n, group = rows[:, None], tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_N // 4)[None, :]
    top = tl.load(top_ptr + rows, rows < M, 0.0)
    total = tl.load(total_ptr + rows, rows < M, 1.0)
    real = _real(m, n, M, N, TAIL)
    dy = tl.load(dy_ptr + m * dy_stride + n, real, 0.0).to(ACC)
    z = noisy(x_ptr, m, n, group, real, x_stride, cool, cool_low, seed, ACC)
    y = tl.exp2((z - top[:, None]) * 1.4426950408889634) * (1.0 / total)[:, None]
    mean = tl.sum(dy * y, axis=1)
    if TAIL:
        n_tail, z_tail = _tail(z_ptr, x_ptr, m, M, N, x_stride, cool, cool_low, seed, BLOCK_N, TAIL, ACC)
        dy_tail = tl.load(dy_ptr + m * dy_stride + n_tail, (m < M) & (n_tail < N), 0.0).to(ACC)
        y_tail = tl.exp2((z_tail - top[:, None]) * 1.4426950408889634) * (1.0 / total)[:, None]
        mean += tl.sum(dy_tail * y_tail, axis=1)
    factor = tl.zeros([], ACC) + cool + cool_low
    tl.store(dx_ptr + m * N + n, y * (dy - mean[:, None]) * factor, real)
    if TAIL:
        tl.store(dx_ptr + m * N + n_tail, y_tail * (dy_tail - mean[:, None]) * factor, (m < M) & (n_tail < N))


def forward(
    logits: torch.Tensor, tau: float, hard: bool, seed: int,
    *, block_m: int | None = None, num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    y = torch.empty_like(logits, memory_format=torch.contiguous_format)
    top, total = (logits.new_empty(logits.shape[:-1], dtype=accumulator(logits.dtype)) for _ in range(2))
    if not logits.numel():
        return y, top.fill_(-torch.inf), total.zero_()
    rows = as_rows(logits)
    M, N = rows.shape
    noise = (M, N, rows.stride(0), *fp32_pair(1 / tau), seed)
    acc = triton_acc(logits.dtype)
    if _walked(N):
        wide_forward(rows, y, top, total, *noise, hard, num_warps=num_warps, ACC=acc)
    else:
        grid, shape = _tiles(M, N, logits.itemsize, block_m, num_warps)
        _forward[grid](rows, _past(rows, noise, shape), y, top, total, *noise, hard, ACC=acc, **shape)
    return y, top, total


def backward(
    dy: torch.Tensor, logits: torch.Tensor, top: torch.Tensor, total: torch.Tensor, tau: float, hard: bool, seed: int,
    *, block_m: int | None = None, num_warps: int | None = None,
) -> tuple[torch.Tensor]:  # fmt: skip
    dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if not logits.numel():
        return (dx,)
    dys, rows = as_rows(dy), as_rows(logits)
    M, N = rows.shape
    noise = (rows.stride(0), *fp32_pair(1 / tau), seed)
    acc = triton_acc(logits.dtype)
    if _walked(N):
        wide_backward(dys, rows, top, total, dx, M, N, dys.stride(0), *noise, num_warps=num_warps, ACC=acc)
    else:
        grid, shape = _tiles(M, N, logits.itemsize, block_m, num_warps)
        z = _past(rows, (M, N, *noise), shape)
        _backward[grid](dys, rows, z, top, total, dx, M, N, dys.stride(0), *noise, ACC=acc, **shape)
    return (dx,)


def _past(rows: torch.Tensor, noise: tuple[int | float, ...], shape: Mapping[str, int]) -> torch.Tensor | None:
    """z[M, TAIL] of short tails, by a launch of its own; None where the rows' programs make it.

    There a tail of one column costs every thread a Philox call, as one of 1,024 does: N = 4,097 loses 24 / 30 % that
    way (forward / backward, H200) and 14 / 18 % this way. In bf16 z is at most a quarter of the logits' bytes.
    """
    tail, block_n = shape["TAIL"], shape["BLOCK_N"]
    if not 0 < tail <= block_n // 8:
        return None
    z = rows.new_empty(len(rows), tail, dtype=accumulator(rows.dtype))
    block_m = max(2048 // tail, 1)
    grid = (triton.cdiv(len(rows), block_m),)
    _tails[grid](rows, z, *noise, block_m, block_n, tail, ACC=triton_acc(rows.dtype), num_warps=4)
    return z


def _walked(N: int) -> bool:
    """Whether a row is more than a program holds, a block and its tail."""
    return N > WHOLE + WHOLE // MOST


def _tiles(
    M: int, N: int, itemsize: int, block_m: int | None, num_warps: int | None
) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and the block sizes and warps, of tiles of whole rows."""
    block_n, tail = blocks(max(N, 4), 0, MOST)
    block_m = block_m or max(1, 2048 // block_n)
    warps = num_warps or min(max(block_m * block_n // (256 if tail == block_n // 4 else 512), 1), 32)
    shape = {"BLOCK_M": block_m, "BLOCK_N": block_n, "TAIL": tail, "num_warps": warps}
    if itemsize < 8:  # left alone, ptxas takes up to 94 where rows are not aligned, and half as many are in work
        shape["maxnreg"] = 80 if tail >= block_n // 4 and warps <= 8 else 64
    return (triton.cdiv(M, block_m),), shape
