"""Gumbel-softmax on Triton: one program owns whole rows and generates their noise; no noise tensor is stored.

Arithmetic is the limit, not memory: an element takes a quarter of a Philox call (about 20 integer operations) and two
logs. So the four words of a call are used for four neighbouring columns. The backward keeps two numbers per row (the
largest z and the sum of exponentials relative to it) and generates the noise again instead of storing a second tensor.
wide_kernels handles rows that do not fit in registers.
"""

import torch
import triton
import triton.language as tl

from bagu.ops.contract.signature import accumulator
from bagu.ops.gumbel_softmax.wide_kernels import noisy, wide_backward, wide_forward
from bagu.ops.kernels.launch import as_rows, fp32_pair, split_row, triton_acc
from bagu.ops.kernels.rows import columns, load_row, masks, max_row, multiply, row_ids, store_row, sum_row
from bagu.ops.kernels.scalars import int64

MAX_BLOCK = 8192  # columns kept in registers: 16 values and their noise per thread; a tail has up to half as many more
TUNABLE = {  # the tests run every combination
    "forward": {"block_m": (1, 4), "num_warps": (4, 8)},
    "backward": {"block_m": (1, 4), "num_warps": (4, 8)},
}


@triton.jit
def _noisy_row(x_ptr, m, n, exists, x_stride, cool, cool_low, seed, ACC: tl.constexpr):
    """z = (logits + noise) / tau of rows m, -inf past their end."""
    group = tl.arange(0, n[0].shape[1] // 4)[None, :]
    z = noisy(x_ptr, m, n[0], group, exists[0], x_stride, cool, cool_low, seed, ACC)
    if len(n) == 2:
        later = n[0].shape[1] // 4 + tl.arange(0, n[1].shape[1] // 4)[None, :]
        return (z, noisy(x_ptr, m, n[1], later, exists[1], x_stride, cool, cool_low, seed, ACC))
    else:
        return (z,)


@triton.jit
def _first(z, top, n, N):
    """The first column that has the row's largest z."""
    first = tl.min(tl.where(z[0] == top, n[0], N), axis=1)
    if len(n) == 2:
        first = tl.minimum(first, tl.min(tl.where(z[1] == top, n[1], N), axis=1))
    return first[:, None]


@triton.jit(do_not_specialize=["seed"])
def _forward(
    x_ptr, y_ptr, top_ptr, total_ptr, M, N, x_stride, cool, cool_low, seed, HARD: tl.constexpr,
    FULL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m, n = row_ids(int64(tl.program_id(0)), BLOCK_M), columns(BLOCK_N, TAIL)
    exists = masks(m, n, M, N, FULL)
    z = _noisy_row(x_ptr, m, n, exists, x_stride, cool, cool_low, seed, ACC)
    top = max_row(z)
    e = [tl.exp2((v - top) * 1.4426950408889634) for v in z]
    total = sum_row(e)
    tl.store(top_ptr + m, tl.zeros([BLOCK_M, 1], ACC) + top, m < M)
    tl.store(total_ptr + m, tl.zeros([BLOCK_M, 1], ACC) + total, m < M)
    if HARD:
        first = _first(z, top, n, N)
        y = [tl.where(v == first, 1.0, 0.0) + (total - total) for v in n]  # adds NaN in a row with NaN
    else:
        r = 1.0 / total
        y = [v * r for v in e]
    store_row(y_ptr, m, n, exists, N, y)


@triton.jit(do_not_specialize=["seed"])
def _backward(
    dy_ptr, x_ptr, top_ptr, total_ptr, dx_ptr, M, N, dy_stride, x_stride, cool, cool_low, seed,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m, n = row_ids(int64(tl.program_id(0)), BLOCK_M), columns(BLOCK_N, TAIL)
    # with a mask by row alone ptxas schedules 3 % slower code (H200, N 2,048 to 8,192)
    exists = masks(m, n, M, N, False)
    top = tl.load(top_ptr + m, m < M, 0.0)
    r = 1.0 / tl.load(total_ptr + m, m < M, 1.0)
    dy = [v.to(ACC) for v in load_row(dy_ptr, m, n, exists, dy_stride)]
    z = _noisy_row(x_ptr, m, n, exists, x_stride, cool, cool_low, seed, ACC)
    y = [tl.exp2((v - top) * 1.4426950408889634) * r for v in z]
    mean = sum_row(multiply(dy, y))
    factor = tl.zeros([], ACC) + cool + cool_low
    dx = multiply(y, [v - mean for v in dy])
    store_row(dx_ptr, m, n, exists, N, [v * factor for v in dx])


def forward(
    logits: torch.Tensor, tau: float, hard: bool, seed: int, *, block_m: int | None = None, num_warps: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y = torch.empty_like(logits, memory_format=torch.contiguous_format)
    top, total = (logits.new_empty(logits.shape[:-1], dtype=accumulator(logits.dtype)) for _ in range(2))
    if not logits.numel():
        return y, top.fill_(-torch.inf), total.zero_()
    rows = as_rows(logits)
    M, N = rows.shape
    noise = (M, N, rows.stride(0), *fp32_pair(1 / tau), seed)
    acc = triton_acc(logits.dtype)
    if N > MAX_BLOCK * 3 // 2:
        wide_forward(rows, y, top, total, *noise, hard, num_warps=num_warps, ACC=acc)
    else:
        grid, shape = _tiles(M, N, logits.itemsize, block_m, num_warps)
        _forward[grid](rows, y, top, total, *noise, hard, FULL=shape["BLOCK_N"] <= N, ACC=acc, **shape)
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
    if N > MAX_BLOCK * 3 // 2:
        wide_backward(dys, rows, top, total, dx, M, N, dys.stride(0), *noise, num_warps=num_warps, ACC=acc)
    else:
        grid, shape = _tiles(M, N, logits.itemsize, block_m, num_warps)
        _backward[grid](dys, rows, top, total, dx, M, N, dys.stride(0), *noise, ACC=acc, **shape)
    return (dx,)


def _tiles(
    M: int, N: int, itemsize: int, block_m: int | None, num_warps: int | None
) -> tuple[tuple[int], dict[str, int]]:
    """The grid, block sizes and warps for tiles of whole rows."""
    block_n, tail = split_row(max(N, 4), 2)
    block_m = block_m or max(1, 2048 // block_n)
    warps = num_warps or min(max(block_m * block_n // (256 if tail == block_n // 4 else 512), 1), 32)
    shape = {"BLOCK_M": block_m, "BLOCK_N": block_n, "TAIL": tail, "num_warps": warps}
    if itemsize < 8:  # without it ptxas takes up to 94 for unaligned rows, and half as many rows are in flight
        shape["maxnreg"] = 80 if tail >= block_n // 4 and warps <= 8 else 64
    return (triton.cdiv(M, block_m),), shape
