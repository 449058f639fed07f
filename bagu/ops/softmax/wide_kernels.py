"""Softmax of rows that no program keeps: walked twice.

The first walk keeps a running maximum and sum in every lane (the tile is DEPTH deep and a lane owns its column, so the
warps never wait for each other, and a rescale costs one exp in DEPTH), the second goes backwards: what was read last is
still in the L1, the rest in the L2, and only the rows in work at one time must fit there. Of a contiguous row that
begins anywhere, with nothing hidden, the aligned body is walked and its two ends are apart (VEC > 0).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from bagu.ops.kernels import apart, int64
from bagu.ops.launch import num_sms, triton_acc, vector

__all__ = ["exist", "scores", "wide_backward", "wide_forward"]

FLIGHT = 16  # bytes of each of its 8 columns that a thread has in flight on a walk: 64 KB a multiprocessor
L2_BYTES = 40 << 20  # of an H200's 60 MB, what the rows in work may take: the results pass through it too


@triton.jit
def exist(n, N, EVEN: tl.constexpr):
    """Which columns exist. With EVEN all do: a comparison the compiler folds, and the masks with it."""
    if EVEN:
        return n == n
    else:
        return n < N


@triton.jit
def scores(
    x_ptr, mask_ptr, lengths_ptr, m, n, M, N, x_stride, fold,
    SIGN: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """x of rows m and columns n (-x for a negative scale), -inf where the row does not see it; and whether it does."""
    keep = (m < M) & exist(n, N, EVEN)
    near = keep
    if lengths_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + m, m < M, 0), 0), N).to(tl.int32)
        near = keep & (n < tl.cdiv(length, 16) * 16)  # nothing far past the length is read, and still in 128 bits
        keep = keep & (n < length)
    other = -float("inf") if SIGN >= 0 else float("inf")
    x = tl.load(x_ptr + m * x_stride + n, near, other, eviction_policy="evict_last").to(ACC)
    if mask_ptr is not None:
        middle, inner, outer_stride, middle_stride, inner_stride, step = fold
        outer = m // inner
        row = outer // middle * outer_stride + outer % middle * middle_stride + m % inner * inner_stride
        keep = keep & (tl.load(mask_ptr + row + n * step, near, 0) != 0)
    if SIGN < 0:
        x = -x
    if mask_ptr is not None or lengths_ptr is not None:
        x = tl.where(keep, x, -float("inf"))
    return x, keep


@triton.jit
def _take(
    top, total, c, x_ptr, mask_ptr, lengths_ptr, m, n, M, N, x_stride, fold,
    SIGN: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Each lane's maximum and sum of exponentials, with the columns n of row m taken in."""
    x, keep = scores(x_ptr, mask_ptr, lengths_ptr, m, n, M, N, x_stride, fold, SIGN, EVEN, ACC)
    now = tl.maximum(top, tl.max(x, axis=0))
    base = tl.where(now == -float("inf"), 0.0, now)  # a lane that has seen nothing must not turn NaN
    e = tl.exp2((x - base[None, :]) * c)
    if SIGN == 0:
        e = tl.where(keep, e, 0.0)
    return now, tl.where(total == 0, 0.0, total * tl.exp2((top - base) * c)) + tl.sum(e, axis=0)


@triton.jit
def _give(
    peak, r, c, x_ptr, y_ptr, mask_ptr, lengths_ptr, m, n, M, N, x_stride, fold,
    SIGN: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Read the columns n of row m again and write their y."""
    x, keep = scores(x_ptr, mask_ptr, lengths_ptr, m, n, M, N, x_stride, fold, SIGN, EVEN, ACC)
    y = tl.exp2((x - peak) * c) * r
    if mask_ptr is not None or lengths_ptr is not None:
        y = tl.where(keep, y, 0.0)
    tl.store(y_ptr + m * N + n, y, exist(n, N, EVEN))


@triton.jit
def _forward_wide(
    x_ptr, y_ptr, mask_ptr, lengths_ptr, M, N, x_stride, c_high, c_low,
    middle, inner, outer_stride, middle_stride, inner_stride, step,
    SIGN: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    fold = (middle, inner, outer_stride, middle_stride, inner_stride, step)
    line = tl.arange(0, LANES)[None, :]
    tile = tl.arange(0, DEPTH)[:, None] * LANES + line
    c = tl.zeros([], ACC) + c_high + c_low
    for i in range(tl.program_id(0), M, tl.num_programs(0)):
        m, x_row, y_row, body = tl.zeros([1, 1], tl.int64) + i, x_ptr, y_ptr, N
        if VEC:  # contiguous and nothing hidden: the body is walked as the one row of its own tensor
            head, body, at, end = apart(int64(i), N, LANES, 2 * VEC, VEC)
            m, first = tl.zeros([1, 1], tl.int64), int64(i) * N
            ends = tl.load(x_ptr + first + at, end, -float("inf") if SIGN >= 0 else float("inf")).to(ACC)
            if SIGN < 0:
                ends = -ends
            start = tl.multiple_of(first + head, VEC)
            x_row, y_row = x_ptr + start, y_ptr + start
        tiled = body // (DEPTH * LANES) * (DEPTH * LANES)  # from here on the row goes line by line
        top = tl.full([LANES], -float("inf"), ACC)
        total = tl.zeros([LANES], ACC)
        for start in range(0, tiled, DEPTH * LANES):
            top, total = _take(
                top, total, c, x_row, mask_ptr, lengths_ptr, m, start + tile, M, body, x_stride, fold, SIGN, True, ACC
            )
        for start in range(tiled, body, LANES):
            top, total = _take(
                top, total, c, x_row, mask_ptr, lengths_ptr, m, start + line, M, body, x_stride, fold, SIGN, False, ACC
            )
        peak = tl.max(top, axis=0)
        if VEC:
            peak = tl.maximum(peak, tl.max(ends))
        mass = tl.sum(tl.where(total == 0, 0.0, total * tl.exp2((top - peak) * c)), axis=0)
        if VEC:
            ends = tl.where(end, tl.exp2((ends - peak) * c), 0.0)
            mass += tl.sum(ends)
        r = 1.0 / mass
        for start in range(tiled, body, LANES):
            _give(
                peak, r, c, x_row, y_row, mask_ptr, lengths_ptr, m, start + line, M, body, x_stride, fold,
                SIGN, False, ACC,
            )  # fmt: skip
        for start in range(DEPTH * LANES, tiled + 1, DEPTH * LANES):
            _give(
                peak, r, c, x_row, y_row, mask_ptr, lengths_ptr, m, tiled - start + tile, M, body, x_stride, fold,
                SIGN, True, ACC,
            )  # fmt: skip
        if VEC:
            tl.store(y_ptr + first + at, ends * r, end)


@triton.jit
def _weigh(dy_ptr, y_ptr, m, n, N, dy_stride, y_stride, EVEN: tl.constexpr, ACC: tl.constexpr):
    """What the columns n of row m add to sum(dy * y) and to sum(y), lane by lane."""
    exists = exist(n, N, EVEN)
    y = tl.load(y_ptr + m * y_stride + n, exists, 0.0).to(ACC)
    dy = tl.load(dy_ptr + m * dy_stride + n, exists, 0.0).to(ACC)
    return tl.sum(tl.where(y != 0, dy, 0.0) * y, axis=0), tl.sum(y, axis=0)


@triton.jit
def _pass(dy_ptr, y_ptr, dx_ptr, mean, factor, m, n, N, dy_stride, y_stride, EVEN: tl.constexpr, ACC: tl.constexpr):
    """Read the columns n of row m again and write their dx."""
    exists = exist(n, N, EVEN)
    y = tl.load(y_ptr + m * y_stride + n, exists, 0.0).to(ACC)
    dy = tl.load(dy_ptr + m * dy_stride + n, exists, 0.0).to(ACC)
    tl.store(dx_ptr + m * N + n, tl.where(y != 0, factor * y * (dy - mean), 0.0), exists)


@triton.jit
def _backward_wide(
    dy_ptr, y_ptr, dx_ptr, M, N, dy_stride, y_stride, scale, scale_low,
    DEPTH: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.arange(0, LANES)[None, :]
    tile = tl.arange(0, DEPTH)[:, None] * LANES + line
    factor = tl.zeros([], ACC) + scale + scale_low
    for i in range(tl.program_id(0), M, tl.num_programs(0)):
        m, dy_row, y_row, dx_row, body = tl.zeros([1, 1], tl.int64) + i, dy_ptr, y_ptr, dx_ptr, N
        if VEC:
            head, body, at, end = apart(int64(i), N, LANES, 2 * VEC, VEC)
            m, first = tl.zeros([1, 1], tl.int64), int64(i) * N
            y_ends = tl.load(y_ptr + first + at, end, 0.0).to(ACC)
            dy_ends = tl.where(y_ends != 0, tl.load(dy_ptr + first + at, end, 0.0).to(ACC), 0.0)
            start = tl.multiple_of(first + head, VEC)
            dy_row, y_row, dx_row = dy_ptr + start, y_ptr + start, dx_ptr + start
        tiled = body // (DEPTH * LANES) * (DEPTH * LANES)
        along = tl.zeros([LANES], ACC)
        mass = tl.zeros([LANES], ACC)
        for start in range(0, tiled, DEPTH * LANES):
            more, weight = _weigh(dy_row, y_row, m, start + tile, body, dy_stride, y_stride, True, ACC)
            along += more
            mass += weight
        for start in range(tiled, body, LANES):
            more, weight = _weigh(dy_row, y_row, m, start + line, body, dy_stride, y_stride, False, ACC)
            along += more
            mass += weight
        alongs, masses = tl.sum(along, axis=0), tl.sum(mass, axis=0)
        if VEC:
            alongs += tl.sum(dy_ends * y_ends)
            masses += tl.sum(y_ends)
        mean = alongs / masses
        for start in range(tiled, body, LANES):
            _pass(dy_row, y_row, dx_row, mean, factor, m, start + line, body, dy_stride, y_stride, False, ACC)
        for start in range(DEPTH * LANES, tiled + 1, DEPTH * LANES):
            _pass(dy_row, y_row, dx_row, mean, factor, m, tiled - start + tile, body, dy_stride, y_stride, True, ACC)
        if VEC:
            dx_ends = tl.where(y_ends != 0, factor * y_ends * (dy_ends - mean), 0.0)
            tl.store(dx_ptr + first + at, dx_ends, end)


def wide_forward(args: tuple[Any, ...], x: torch.Tensor, hides: bool, sign: int, num_warps: int | None) -> None:
    """Launch with `args` for rows x[M, N]; `hides` says that a mask or lengths hide some of it."""
    M, N = x.shape
    programs, warps = _programs(M, N * x.itemsize, num_sms(x.device), num_warps)
    _forward_wide[(programs,)](
        *args, SIGN=sign, DEPTH=max(1, FLIGHT // x.itemsize // (4 if hides else 1)),  # a mask takes registers
        LANES=256 * warps, VEC=0 if hides else vector(x), ACC=triton_acc(x.dtype), num_warps=warps,
    )  # fmt: skip


def wide_backward(args: tuple[Any, ...], dy: torch.Tensor, y: torch.Tensor, num_warps: int | None) -> None:
    """Launch with `args` for rows dy and y[M, N]."""
    (M, N), vec = y.shape, vector(dy, y)
    programs, warps = _programs(M, 2 * N * y.itemsize, num_sms(y.device), num_warps)
    aligned = vec or N % 8 == 0  # if not, an address a value takes registers
    _backward_wide[(programs,)](
        *args, DEPTH=max(1, FLIGHT // y.itemsize // (2 if aligned else 4)), LANES=256 * warps, VEC=vec,
        ACC=triton_acc(y.dtype), num_warps=warps,
    )  # fmt: skip


def _programs(M: int, row_bytes: int, sms: int, num_warps: int | None) -> tuple[int, int]:
    """Programs, and the warps of each, for rows that are walked: two a multiprocessor where the L2 holds their rows."""
    per_sm = 2 if 2 * sms * row_bytes <= L2_BYTES else 1
    return min(M, per_sm * sms), num_warps or 16 // per_sm
