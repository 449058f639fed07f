"""Gumbel-softmax on Triton: one program owns whole rows, and the noise is made where it is used, never stored.

Arithmetic is the limit, not memory: an element takes a quarter of a Philox call (about 20 integer operations) and two
logs. So the four words of a call go to four neighbours, and the backward keeps two numbers a row (the largest z and
the sum of exponentials under it) and draws the noise again, rather than keep a second tensor. A row past WHOLE and its
tail is walked in tiles DEPTH lines deep, each lane with a running maximum, and walked again to write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.launch import as_rows, blocks, fp32_pair, num_sms, triton_acc
from bagu.ops.signature import accumulator

WHOLE = 8192  # the longest block kept in registers: 16 values and their noise a thread; half as much may be past it
DEPTH = 2  # lines of a wide row in one tile
TUNABLE = {  # tests run each point
    "forward": {"block_m": (1, 4), "num_warps": (4, 8)},
    "backward": {"block_m": (1, 4), "num_warps": (4, 8)},
}


@triton.jit
def _gumbel(seed, m, group, ACC: tl.constexpr):
    """Noise for rows m and groups of four columns; noise.py has the same in PyTorch."""
    zero = tl.zeros([1, 1], tl.uint32)
    a, b, c, d = tl.philox(seed, group.to(tl.uint32), m.to(tl.uint32) + zero, (m >> 32).to(tl.uint32) + zero, zero)
    word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d)).to(tl.int32, bitcast=True)
    below = word >= 0  # u < 1/2
    near = ((word ^ (word >> 31)).to(ACC) + 0.5) * 2.3283064365386963e-10  # 2^-32: how far u is from 0 or from 1
    v = tl.where(below, 1.0 - near, near)  # 1 - u, rounded where u is small,
    slip = tl.where(below, (1.0 - v) - near, 0.0)  # and by how much: log(v + slip) = log(v) + slip near 1
    return -tl.log(-tl.log(v) - slip)


@triton.jit
def _noisy(x_ptr, m, n, group, M, N, x_stride, cool, cool_low, seed, ACC: tl.constexpr):
    """z = (logits + noise) / tau of rows m and columns n, -inf outside."""
    x = tl.load(x_ptr + m * x_stride + n, (m < M) & (n < N), -float("inf")).to(ACC)
    return (x + _gumbel(seed, m, group, ACC)) * (tl.zeros([], ACC) + cool + cool_low)


@triton.jit
def _share(z, top, total, first, n, HARD: tl.constexpr):
    """y of the columns n, from the row's largest z, its sum of exponentials and the first column of the largest."""
    if HARD:
        return tl.where(n == first[:, None], 1.0, 0.0) + (total - total)[:, None]  # + NaN in a row of NaN
    else:
        return tl.exp2((z - top[:, None]) * 1.4426950408889634) * (1.0 / total)[:, None]


@triton.jit(do_not_specialize=["seed"])
def _forward(
    x_ptr, y_ptr, top_ptr, total_ptr, M, N, x_stride, cool, cool_low, seed,
    HARD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    m, n, group = rows[:, None], tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_N // 4)[None, :]
    z = _noisy(x_ptr, m, n, group, M, N, x_stride, cool, cool_low, seed, ACC)
    top = tl.max(z, axis=1)
    if TAIL:
        n_tail, group = BLOCK_N + tl.arange(0, TAIL)[None, :], BLOCK_N // 4 + tl.arange(0, TAIL // 4)[None, :]
        z_tail = _noisy(x_ptr, m, n_tail, group, M, N, x_stride, cool, cool_low, seed, ACC)
        top = tl.maximum(top, tl.max(z_tail, axis=1))
    total = tl.sum(tl.exp2((z - top[:, None]) * 1.4426950408889634), axis=1)
    first = tl.min(tl.where(z == top[:, None], n, N), axis=1)
    if TAIL:
        total += tl.sum(tl.exp2((z_tail - top[:, None]) * 1.4426950408889634), axis=1)
        first = tl.minimum(first, tl.min(tl.where(z_tail == top[:, None], n_tail, N), axis=1))
    tl.store(top_ptr + rows, top, rows < M)
    tl.store(total_ptr + rows, total, rows < M)
    tl.store(y_ptr + m * N + n, _share(z, top, total, first, n, HARD), (m < M) & (n < N))
    if TAIL:
        tl.store(y_ptr + m * N + n_tail, _share(z_tail, top, total, first, n_tail, HARD), (m < M) & (n_tail < N))


@triton.jit(do_not_specialize=["seed"])
def _forward_wide(
    x_ptr, y_ptr, top_ptr, total_ptr, M, N, x_stride, cool, cool_low, seed,
    HARD: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    quads = tl.arange(0, DEPTH)[:, None] * (LANES // 4) + tl.arange(0, LANES // 4)[None, :]
    for i in range(tl.program_id(0), M, tl.num_programs(0)):
        m = tl.zeros([1, 1], tl.int64) + i
        tops = tl.full([LANES], -float("inf"), ACC)
        totals = tl.zeros([LANES], ACC)
        firsts = tl.zeros([LANES], tl.int32) + N
        for start in range(0, N, DEPTH * LANES):
            n = start + tile
            z = _noisy(x_ptr, m, n, start // 4 + quads, M, N, x_stride, cool, cool_low, seed, ACC)
            peak = tl.max(z, axis=0)
            if HARD:
                first = tl.min(tl.where(z == peak[None, :], n, N), axis=0)
                firsts = tl.where(peak > tops, first, firsts)
            now = tl.maximum(tops, peak)
            base = tl.where(now == -float("inf"), 0.0, now)  # a lane that has seen nothing must not turn NaN
            e = tl.exp2((z - base[None, :]) * 1.4426950408889634)
            totals = totals * tl.exp2((tops - base) * 1.4426950408889634) + tl.sum(e, axis=0)
            tops = now
        top = tl.max(tops, axis=0)
        total = tl.sum(totals * tl.exp2((tops - top) * 1.4426950408889634), axis=0)
        tl.store(top_ptr + i, top)
        tl.store(total_ptr + i, total)
        place = tl.min(tl.where(tops == top, firsts, N), axis=0)
        for start in range(0, N, DEPTH * LANES):
            n = start + tile
            if HARD:
                y = tl.where(n == place, 1.0, 0.0) + (total - total)
            else:
                z = _noisy(x_ptr, m, n, start // 4 + quads, M, N, x_stride, cool, cool_low, seed, ACC)
                y = tl.exp2((z - top) * 1.4426950408889634) * (1.0 / total)
            tl.store(y_ptr + m * N + n, y, n < N)


@triton.jit
def _again(dy_ptr, x_ptr, top, total, m, n, group, M, N, dy_stride, x_stride, cool, cool_low, seed, ACC: tl.constexpr):
    """dy and y of rows m and columns n."""
    dy = tl.load(dy_ptr + m * dy_stride + n, (m < M) & (n < N), 0.0).to(ACC)
    z = _noisy(x_ptr, m, n, group, M, N, x_stride, cool, cool_low, seed, ACC)
    return dy, tl.exp2((z - top[:, None]) * 1.4426950408889634) * (1.0 / total)[:, None]


@triton.jit(do_not_specialize=["seed"])
def _backward(
    dy_ptr, x_ptr, top_ptr, total_ptr, dx_ptr, M, N, dy_stride, x_stride, cool, cool_low, seed,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    m, n, group = rows[:, None], tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_N // 4)[None, :]
    top = tl.load(top_ptr + rows, rows < M, 0.0)
    total = tl.load(total_ptr + rows, rows < M, 1.0)
    dy, y = _again(dy_ptr, x_ptr, top, total, m, n, group, M, N, dy_stride, x_stride, cool, cool_low, seed, ACC)
    mean = tl.sum(dy * y, axis=1)
    if TAIL:
        n_tail, group = BLOCK_N + tl.arange(0, TAIL)[None, :], BLOCK_N // 4 + tl.arange(0, TAIL // 4)[None, :]
        dy_tail, y_tail = _again(
            dy_ptr, x_ptr, top, total, m, n_tail, group, M, N, dy_stride, x_stride, cool, cool_low, seed, ACC
        )
        mean += tl.sum(dy_tail * y_tail, axis=1)
    factor = tl.zeros([], ACC) + cool + cool_low
    tl.store(dx_ptr + m * N + n, y * (dy - mean[:, None]) * factor, (m < M) & (n < N))
    if TAIL:
        tl.store(dx_ptr + m * N + n_tail, y_tail * (dy_tail - mean[:, None]) * factor, (m < M) & (n_tail < N))


@triton.jit(do_not_specialize=["seed"])
def _backward_wide(
    dy_ptr, x_ptr, top_ptr, total_ptr, dx_ptr, M, N, dy_stride, x_stride, cool, cool_low, seed,
    DEPTH: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    quads = tl.arange(0, DEPTH)[:, None] * (LANES // 4) + tl.arange(0, LANES // 4)[None, :]
    for i in range(tl.program_id(0), M, tl.num_programs(0)):
        m = tl.zeros([1, 1], tl.int64) + i
        top = tl.load(top_ptr + i)
        r = 1.0 / tl.load(total_ptr + i)
        means = tl.zeros([LANES], ACC)
        for start in range(0, N, DEPTH * LANES):
            n = start + tile
            dy = tl.load(dy_ptr + m * dy_stride + n, n < N, 0.0).to(ACC)
            z = _noisy(x_ptr, m, n, start // 4 + quads, M, N, x_stride, cool, cool_low, seed, ACC)
            means += tl.sum(dy * tl.exp2((z - top) * 1.4426950408889634) * r, axis=0)
        mean = tl.sum(means, axis=0)
        for start in range(0, N, DEPTH * LANES):
            n = start + tile
            dy = tl.load(dy_ptr + m * dy_stride + n, n < N, 0.0).to(ACC)
            z = _noisy(x_ptr, m, n, start // 4 + quads, M, N, x_stride, cool, cool_low, seed, ACC)
            y = tl.exp2((z - top) * 1.4426950408889634) * r
            tl.store(dx_ptr + m * N + n, y * (dy - mean) * (tl.zeros([], ACC) + cool + cool_low), n < N)


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
    args = (rows, y, top, total, M, N, rows.stride(0), *fp32_pair(1 / tau), seed, hard)
    grid, shape = _tiles(M, N, num_sms(logits.device), logits.itemsize, block_m, num_warps)
    (_forward_wide if "LANES" in shape else _forward)[grid](*args, ACC=triton_acc(logits.dtype), **shape)
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
    args = (dys, rows, top, total, dx, M, N, dys.stride(0), rows.stride(0), *fp32_pair(1 / tau), seed)
    grid, shape = _tiles(M, N, num_sms(logits.device), logits.itemsize, block_m, num_warps)
    (_backward_wide if "LANES" in shape else _backward)[grid](*args, ACC=triton_acc(logits.dtype), **shape)
    return (dx,)


def _tiles(
    M: int, N: int, sms: int, itemsize: int, block_m: int | None, num_warps: int | None
) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and the block sizes and warps: a tile of whole rows, or two programs a multiprocessor that walk."""
    block_n, tail = blocks(max(N, 4), 0, 2)
    if block_n > WHOLE:
        warps = num_warps or 8
        return (min(M, 2 * sms),), {"DEPTH": DEPTH, "LANES": 256 * warps, "num_warps": warps}
    block_m = block_m or max(1, 2048 // block_n)
    warps = num_warps or min(max(block_m * block_n // (256 if 16 < tail <= block_n // 4 else 512), 1), 32)
    shape = {"BLOCK_M": block_m, "BLOCK_N": block_n, "TAIL": tail, "num_warps": warps}
    if itemsize < 8:  # left alone, ptxas takes up to 94 where rows are not aligned, and half as many are in work
        shape["maxnreg"] = 80 if tail and warps <= 8 else 64
    return (triton.cdiv(M, block_m),), shape
