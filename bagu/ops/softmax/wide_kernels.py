"""Softmax of rows that do not fit in registers: two passes over each row, in tiles.

In the first pass every lane keeps a running maximum and sum. A tile is DEPTH deep and a lane owns its column, so warps
never wait for each other, and a rescale costs one exp in DEPTH. The second pass goes backwards: the data that was read
last is still in the L1, the rest in the L2, and only the rows in flight must fit there.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.launch import num_sms, triton_acc

FLIGHT = 16  # bytes of each of its 8 columns that a thread has in flight in a pass: 64 KB per multiprocessor
L2_BYTES = 40 << 20  # of an H200's 60 MB, for the rows in flight: the results also go through the L2


@triton.jit
def scores(x_ptr, mask_ptr, lengths_ptr, m, n, exists, M, N, x_stride, fold, SIGN: tl.constexpr, ACC: tl.constexpr):
    """x of rows m and columns n (-x for a negative scale), -inf if it is not visible; and whether it is visible."""
    keep = exists
    near = exists
    if lengths_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + m, m < M, 0), 0), N).to(tl.int32)
        near = exists & (n < tl.cdiv(length, 16) * 16)  # reads nothing far past the length, still in 128 bits
        keep = exists & (n < length)
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
def _update(
    top, total, c, x_ptr, mask_ptr, lengths_ptr, m, n, exists, M, N, x_stride, fold,
    SIGN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Update each lane's maximum and sum of exponentials with the columns n of row m."""
    x, keep = scores(x_ptr, mask_ptr, lengths_ptr, m, n, exists, M, N, x_stride, fold, SIGN, ACC)
    now = tl.maximum(top, tl.max(x, axis=0))
    base = tl.where(now == -float("inf"), 0.0, now)  # a lane that has only -inf so far must not become NaN
    e = tl.exp2((x - base[None, :]) * c)
    if SIGN == 0:
        e = tl.where(keep, e, 0.0)
    return now, tl.where(total == 0, 0.0, total * tl.exp2((top - base) * c)) + tl.sum(e, axis=0)


@triton.jit
def _write_y(
    peak, r, c, x_ptr, y_ptr, mask_ptr, lengths_ptr, m, n, exists, M, N, x_stride, fold,
    SIGN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Read the columns n of row m again and write their y."""
    x, keep = scores(x_ptr, mask_ptr, lengths_ptr, m, n, exists, M, N, x_stride, fold, SIGN, ACC)
    y = tl.exp2((x - peak) * c) * r
    if mask_ptr is not None or lengths_ptr is not None:
        y = tl.where(keep, y, 0.0)
    tl.store(y_ptr + m * N + n, y, exists)


@triton.jit
def _forward_wide(
    x_ptr, y_ptr, mask_ptr, lengths_ptr, M, N, x_stride, c_high, c_low,
    middle, inner, outer_stride, middle_stride, inner_stride, step,
    SIGN: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    fold = (middle, inner, outer_stride, middle_stride, inner_stride, step)
    line = tl.arange(0, LANES)[None, :]
    tile = tl.arange(0, DEPTH)[:, None] * LANES + line
    every = tile == tile  # the compiler folds it, and removes the masks of full tiles
    tiled = N // (DEPTH * LANES) * (DEPTH * LANES)  # from here on the row is processed line by line
    c = tl.zeros([], ACC) + c_high + c_low
    for i in range(tl.program_id(0), M, tl.num_programs(0)):
        m = tl.zeros([1, 1], tl.int64) + i
        top = tl.full([LANES], -float("inf"), ACC)
        total = tl.zeros([LANES], ACC)
        for start in range(0, tiled, DEPTH * LANES):
            n = start + tile
            top, total = _update(
                top, total, c, x_ptr, mask_ptr, lengths_ptr, m, n, every, M, N, x_stride, fold, SIGN, ACC
            )
        for start in range(tiled, N, LANES):
            n = start + line
            top, total = _update(
                top, total, c, x_ptr, mask_ptr, lengths_ptr, m, n, n < N, M, N, x_stride, fold, SIGN, ACC
            )
        peak = tl.max(top, axis=0)
        r = 1.0 / tl.sum(tl.where(total == 0, 0.0, total * tl.exp2((top - peak) * c)), axis=0)
        for start in range(tiled, N, LANES):
            n = start + line
            _write_y(peak, r, c, x_ptr, y_ptr, mask_ptr, lengths_ptr, m, n, n < N, M, N, x_stride, fold, SIGN, ACC)
        for start in range(DEPTH * LANES, tiled + 1, DEPTH * LANES):
            n = tiled - start + tile
            _write_y(peak, r, c, x_ptr, y_ptr, mask_ptr, lengths_ptr, m, n, every, M, N, x_stride, fold, SIGN, ACC)


@triton.jit
def _sums(dy_ptr, y_ptr, m, n, exists, dy_stride, y_stride, ACC: tl.constexpr):
    """The contribution of the columns n of row m to sum(dy * y) and to sum(y), per lane."""
    y = tl.load(y_ptr + m * y_stride + n, exists, 0.0).to(ACC)
    dy = tl.load(dy_ptr + m * dy_stride + n, exists, 0.0).to(ACC)
    return tl.sum(tl.where(y != 0, dy, 0.0) * y, axis=0), tl.sum(y, axis=0)


@triton.jit
def _write_dx(dy_ptr, y_ptr, dx_ptr, mean, factor, m, n, exists, N, dy_stride, y_stride, ACC: tl.constexpr):
    """Read the columns n of row m again and write their dx."""
    y = tl.load(y_ptr + m * y_stride + n, exists, 0.0).to(ACC)
    dy = tl.load(dy_ptr + m * dy_stride + n, exists, 0.0).to(ACC)
    tl.store(dx_ptr + m * N + n, tl.where(y != 0, factor * y * (dy - mean), 0.0), exists)


@triton.jit
def _backward_wide(
    dy_ptr, y_ptr, dx_ptr, M, N, dy_stride, y_stride, scale, scale_low,
    DEPTH: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.arange(0, LANES)[None, :]
    tile = tl.arange(0, DEPTH)[:, None] * LANES + line
    every = tile == tile
    tiled = N // (DEPTH * LANES) * (DEPTH * LANES)
    factor = tl.zeros([], ACC) + scale + scale_low
    for i in range(tl.program_id(0), M, tl.num_programs(0)):
        m = tl.zeros([1, 1], tl.int64) + i
        products = tl.zeros([LANES], ACC)
        mass = tl.zeros([LANES], ACC)
        for start in range(0, tiled, DEPTH * LANES):
            product, part = _sums(dy_ptr, y_ptr, m, start + tile, every, dy_stride, y_stride, ACC)
            products += product
            mass += part
        for start in range(tiled, N, LANES):
            n = start + line
            product, part = _sums(dy_ptr, y_ptr, m, n, n < N, dy_stride, y_stride, ACC)
            products += product
            mass += part
        mean = tl.sum(products, axis=0) / tl.sum(mass, axis=0)
        for start in range(tiled, N, LANES):
            n = start + line
            _write_dx(dy_ptr, y_ptr, dx_ptr, mean, factor, m, n, n < N, N, dy_stride, y_stride, ACC)
        for start in range(DEPTH * LANES, tiled + 1, DEPTH * LANES):
            n = tiled - start + tile
            _write_dx(dy_ptr, y_ptr, dx_ptr, mean, factor, m, n, every, N, dy_stride, y_stride, ACC)


def wide_forward(args: tuple[Any, ...], x: torch.Tensor, hides: bool, sign: int, num_warps: int | None) -> None:
    """Launch with `args` for rows x[M, N]; `hides` is true if there is a mask or lengths."""
    M, N = x.shape
    programs, warps = _programs(M, N * x.itemsize, num_sms(x.device), num_warps)
    _forward_wide[(programs,)](
        *args,
        SIGN=sign,
        DEPTH=max(1, FLIGHT // x.itemsize // (4 if hides else 1)),  # a mask takes registers
        LANES=256 * warps,
        ACC=triton_acc(x.dtype),
        num_warps=warps,
    )


def wide_backward(args: tuple[Any, ...], y: torch.Tensor, num_warps: int | None) -> None:
    """Launch with `args` for rows of y[M, N]."""
    M, N = y.shape
    programs, warps = _programs(M, 2 * N * y.itemsize, num_sms(y.device), num_warps)
    depth = FLIGHT // y.itemsize // (2 if N % 8 == 0 else 4)  # if not aligned, one address per value takes registers
    _backward_wide[(programs,)](*args, DEPTH=max(1, depth), LANES=256 * warps, ACC=triton_acc(y.dtype), num_warps=warps)


def _programs(M: int, row_bytes: int, sms: int, num_warps: int | None) -> tuple[int, int]:
    """Programs and warps of each: two programs per multiprocessor if the L2 holds their rows for the second pass."""
    per_sm = 2 if 2 * sms * row_bytes <= L2_BYTES else 1
    return min(M, per_sm * sms), num_warps or 16 // per_sm
