"""Gumbel-softmax of rows that do not fit in registers: a first pass in tiles DEPTH lines deep, where each lane keeps a
running maximum, and a second pass that writes. Also computes z, the logits with their noise, for all kernels of the op.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.launch import num_sms

DEPTH = 2  # lines of a wide row in one tile


@triton.jit
def _gumbel(seed, m, group, ACC: tl.constexpr):
    """Noise for rows m and groups of four columns; noise.py computes the same in PyTorch."""
    zero = tl.zeros([1, 1], tl.uint32)
    a, b, c, d = tl.philox(seed, group.to(tl.uint32), m.to(tl.uint32) + zero, (m >> 32).to(tl.uint32) + zero, zero)
    word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d)).to(tl.int32, bitcast=True)
    below = word >= 0  # u < 1/2
    near = ((word ^ (word >> 31)).to(ACC) + 0.5) * 2.3283064365386963e-10  # 2^-32: the distance of u from 0 or from 1
    v = tl.where(below, 1.0 - near, near)  # 1 - u, which is rounded if u is small,
    slip = tl.where(below, (1.0 - v) - near, 0.0)  # and the rounding error: log(v + slip) = log(v) + slip near 1
    return -tl.log(-tl.log(v) - slip)


@triton.jit
def noisy(x_ptr, m, n, group, real, x_stride, cool, cool_low, seed, ACC: tl.constexpr):
    """z = (logits + noise) / tau of rows m and columns n, -inf where not `real`."""
    x = tl.load(x_ptr + m * x_stride + n, real, -float("inf")).to(ACC)
    return (x + _gumbel(seed, m, group, ACC)) * (tl.zeros([], ACC) + cool + cool_low)


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
            z = noisy(x_ptr, m, n, start // 4 + quads, n < N, x_stride, cool, cool_low, seed, ACC)
            peak = tl.max(z, axis=0)
            if HARD:
                first = tl.min(tl.where(z == peak[None, :], n, N), axis=0)
                firsts = tl.where(peak > tops, first, firsts)
            now = tl.maximum(tops, peak)
            base = tl.where(now == -float("inf"), 0.0, now)  # a lane that has only -inf so far must not become NaN
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
                z = noisy(x_ptr, m, n, start // 4 + quads, n < N, x_stride, cool, cool_low, seed, ACC)
                y = tl.exp2((z - top) * 1.4426950408889634) * (1.0 / total)
            tl.store(y_ptr + m * N + n, y, n < N)


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
            z = noisy(x_ptr, m, n, start // 4 + quads, n < N, x_stride, cool, cool_low, seed, ACC)
            means += tl.sum(dy * tl.exp2((z - top) * 1.4426950408889634) * r, axis=0)
        mean = tl.sum(means, axis=0)
        for start in range(0, N, DEPTH * LANES):
            n = start + tile
            dy = tl.load(dy_ptr + m * dy_stride + n, n < N, 0.0).to(ACC)
            z = noisy(x_ptr, m, n, start // 4 + quads, n < N, x_stride, cool, cool_low, seed, ACC)
            y = tl.exp2((z - top) * 1.4426950408889634) * r
            tl.store(dx_ptr + m * N + n, y * (dy - mean) * (tl.zeros([], ACC) + cool + cool_low), n < N)


def wide_forward(rows: torch.Tensor, *args: Any, num_warps: int | None, **options: Any) -> None:
    """Launch `_forward_wide` for these rows; args and options are the kernel's."""
    _forward_wide[_grid(rows)](rows, *args, **_tile(num_warps), **options)


def wide_backward(dys: torch.Tensor, rows: torch.Tensor, *args: Any, num_warps: int | None, **options: Any) -> None:
    """Launch `_backward_wide` for these rows; args and options are the kernel's."""
    _backward_wide[_grid(rows)](dys, rows, *args, **_tile(num_warps), **options)


def _grid(rows: torch.Tensor) -> tuple[int]:
    """Two programs per multiprocessor."""
    return (min(len(rows), 2 * num_sms(rows.device)),)


def _tile(num_warps: int | None) -> dict[str, int]:
    warps = num_warps or 8
    return {"DEPTH": DEPTH, "LANES": 256 * warps, "num_warps": warps}
