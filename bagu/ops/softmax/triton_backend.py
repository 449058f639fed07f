"""Softmax on Triton: one program owns whole rows, so x crosses memory once each way; memory is the limit.

A row of at most WHOLE columns stays in registers, about 32 values a thread forward and 16 + 16 backward: few warps a
row, so that many rows are in flight and one row's loads hide another's sums. A longer row is walked twice. The first
walk keeps a running maximum and sum in every lane (the tile is DEPTH deep and a lane owns its column, so the warps
never wait for each other, and a rescale costs one exp in DEPTH), the second goes backwards: what was read last is
still in the L1, the rest in the L2, and only the rows in work at one time must fit there.

A mask is read through its own strides: [T, S] under [B, H, T, S] is never written out. Backward needs only y and dy.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
import triton
import triton.language as tl

from bagu.ops.launch import as_rows, next_power_of_2, num_sms, triton_acc

WHOLE = 16384  # the longest row a forward keeps in registers, at 32 values a thread; 1,024 threads have too few each
WHOLE_BACKWARD = 8192  # y and dy are both kept
LOG2E = 1.4426950408889634  # exp(x) = exp2(x * LOG2E): exp2 is one instruction, and the factor joins the scale
FLIGHT = 16  # bytes of each of its 8 columns that a thread has in flight on a walk: 64 KB a multiprocessor
L2_BYTES = 40 << 20  # of an H200's 60 MB, what the rows in work may take: the results pass through it too
TUNABLE = {  # tests run each point
    "forward": {"block_m": (1, 2, 4), "num_warps": (2, 4, 8)},
    "backward": {"block_m": (1, 2, 4), "num_warps": (4, 8)},
}


@triton.jit
def _real(n, N, EVEN: tl.constexpr):
    """Which columns exist. With EVEN all do: a comparison the compiler folds, and the masks with it."""
    if EVEN:
        return n == n
    else:
        return n < N


@triton.jit
def _scores(
    x_ptr, mask_ptr, lengths_ptr, m, n, M, N, x_stride, fold,
    SIGN: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """x of rows m and columns n (-x for a negative scale), -inf where the row does not see it; and whether it does."""
    keep = (m < M) & _real(n, N, EVEN)
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
def _exponentials(x, keep, peak, c, SIGN: tl.constexpr):
    """exp(c * (x - peak)), and 0 where a scale of 0 meets a hidden -inf, whose product is NaN."""
    e = tl.exp2((x - peak) * c)
    if SIGN == 0:
        e = tl.where(keep, e, 0.0)
    return e


@triton.jit
def _shares(y_ptr, e, keep, r, m, n, M, N, SEES_ALL: tl.constexpr, EVEN: tl.constexpr):
    y = e * r
    if not SEES_ALL:
        y = tl.where(keep, y, 0.0)
    tl.store(y_ptr + m * N + n, y, (m < M) & _real(n, N, EVEN))


@triton.jit
def _forward(
    x_ptr, y_ptr, mask_ptr, lengths_ptr, M, N, x_stride, c_high, c_low,
    middle, inner, outer_stride, middle_stride, inner_stride, step,
    SIGN: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    fold = (middle, inner, outer_stride, middle_stride, inner_stride, step)
    sees_all: tl.constexpr = mask_ptr is None and lengths_ptr is None
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    x, keep = _scores(x_ptr, mask_ptr, lengths_ptr, m, n, M, N, x_stride, fold, SIGN, EVEN, ACC)
    c = tl.zeros([], ACC) + c_high + c_low
    peak = tl.max(x, axis=1)  # it drops a NaN, the sum does not
    if TAIL:
        n_tail = BLOCK_N + tl.arange(0, TAIL)[None, :]
        tail, kept = _scores(x_ptr, mask_ptr, lengths_ptr, m, n_tail, M, N, x_stride, fold, SIGN, False, ACC)
        peak = tl.maximum(peak, tl.max(tail, axis=1))
        tail = _exponentials(tail, kept, peak[:, None], c, SIGN)
    e = _exponentials(x, keep, peak[:, None], c, SIGN)
    total = tl.sum(e, axis=1)
    if TAIL:
        total += tl.sum(tail, axis=1)
    r = (1.0 / total)[:, None]
    _shares(y_ptr, e, keep, r, m, n, M, N, sees_all, EVEN)
    if TAIL:
        _shares(y_ptr, tail, kept, r, m, n_tail, M, N, sees_all, False)


@triton.jit
def _take(
    top, total, c, x_ptr, mask_ptr, lengths_ptr, m, n, M, N, x_stride, fold,
    SIGN: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Each lane's maximum and sum of exponentials, with the columns n of row m taken in."""
    x, keep = _scores(x_ptr, mask_ptr, lengths_ptr, m, n, M, N, x_stride, fold, SIGN, EVEN, ACC)
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
    x, keep = _scores(x_ptr, mask_ptr, lengths_ptr, m, n, M, N, x_stride, fold, SIGN, EVEN, ACC)
    y = tl.exp2((x - peak) * c) * r
    if mask_ptr is not None or lengths_ptr is not None:
        y = tl.where(keep, y, 0.0)
    tl.store(y_ptr + m * N + n, y, _real(n, N, EVEN))


@triton.jit
def _forward_wide(
    x_ptr, y_ptr, mask_ptr, lengths_ptr, M, N, x_stride, c_high, c_low,
    middle, inner, outer_stride, middle_stride, inner_stride, step,
    SIGN: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    fold = (middle, inner, outer_stride, middle_stride, inner_stride, step)
    line = tl.arange(0, LANES)[None, :]
    tile = tl.arange(0, DEPTH)[:, None] * LANES + line
    tiled = N // (DEPTH * LANES) * (DEPTH * LANES)  # from here to N the row goes line by line
    c = tl.zeros([], ACC) + c_high + c_low
    for i in range(tl.program_id(0), M, tl.num_programs(0)):
        m = tl.zeros([1, 1], tl.int64) + i
        top = tl.full([LANES], -float("inf"), ACC)
        total = tl.zeros([LANES], ACC)
        for start in range(0, tiled, DEPTH * LANES):
            top, total = _take(
                top, total, c, x_ptr, mask_ptr, lengths_ptr, m, start + tile, M, N, x_stride, fold, SIGN, True, ACC
            )
        for start in range(tiled, N, LANES):
            top, total = _take(
                top, total, c, x_ptr, mask_ptr, lengths_ptr, m, start + line, M, N, x_stride, fold, SIGN, False, ACC
            )
        peak = tl.max(top, axis=0)
        r = 1.0 / tl.sum(tl.where(total == 0, 0.0, total * tl.exp2((top - peak) * c)), axis=0)
        for start in range(tiled, N, LANES):
            _give(
                peak, r, c, x_ptr, y_ptr, mask_ptr, lengths_ptr, m, start + line, M, N, x_stride, fold,
                SIGN, False, ACC,
            )  # fmt: skip
        for start in range(DEPTH * LANES, tiled + 1, DEPTH * LANES):
            _give(
                peak, r, c, x_ptr, y_ptr, mask_ptr, lengths_ptr, m, tiled - start + tile, M, N, x_stride, fold,
                SIGN, True, ACC,
            )  # fmt: skip


@triton.jit
def _heard(dy_ptr, y_ptr, m, n, M, N, dy_stride, y_stride, ACC: tl.constexpr):
    """y, and dy where y is not 0."""
    real = (m < M) & (n < N)
    y = tl.load(y_ptr + m * y_stride + n, real, 0.0, eviction_policy="evict_last").to(ACC)
    dy = tl.load(dy_ptr + m * dy_stride + n, real, 0.0, eviction_policy="evict_last").to(ACC)
    return y, tl.where(y != 0, dy, 0.0)


@triton.jit
def _backward(
    dy_ptr, y_ptr, dx_ptr, M, N, dy_stride, y_stride, scale, scale_low,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    y, dy = _heard(dy_ptr, y_ptr, m, n, M, N, dy_stride, y_stride, ACC)
    along, mass = tl.sum(dy * y, axis=1), tl.sum(y, axis=1)
    if TAIL:
        n_tail = BLOCK_N + tl.arange(0, TAIL)[None, :]
        y_tail, dy_tail = _heard(dy_ptr, y_ptr, m, n_tail, M, N, dy_stride, y_stride, ACC)
        along, mass = along + tl.sum(dy_tail * y_tail, axis=1), mass + tl.sum(y_tail, axis=1)
    mean = (along / mass)[:, None]  # over the sum of the rounded y: see torch_backend.py
    factor = tl.zeros([], ACC) + scale + scale_low
    tl.store(dx_ptr + m * N + n, tl.where(y != 0, factor * y * (dy - mean), 0.0), (m < M) & (n < N))
    if TAIL:
        dx = tl.where(y_tail != 0, factor * y_tail * (dy_tail - mean), 0.0)
        tl.store(dx_ptr + m * N + n_tail, dx, (m < M) & (n_tail < N))


@triton.jit
def _weigh(dy_ptr, y_ptr, m, n, N, dy_stride, y_stride, EVEN: tl.constexpr, ACC: tl.constexpr):
    """What the columns n of row m add to sum(dy * y) and to sum(y), lane by lane."""
    real = _real(n, N, EVEN)
    y = tl.load(y_ptr + m * y_stride + n, real, 0.0).to(ACC)
    dy = tl.load(dy_ptr + m * dy_stride + n, real, 0.0).to(ACC)
    return tl.sum(tl.where(y != 0, dy, 0.0) * y, axis=0), tl.sum(y, axis=0)


@triton.jit
def _pass(dy_ptr, y_ptr, dx_ptr, mean, factor, m, n, N, dy_stride, y_stride, EVEN: tl.constexpr, ACC: tl.constexpr):
    """Read the columns n of row m again and write their dx."""
    real = _real(n, N, EVEN)
    y = tl.load(y_ptr + m * y_stride + n, real, 0.0).to(ACC)
    dy = tl.load(dy_ptr + m * dy_stride + n, real, 0.0).to(ACC)
    tl.store(dx_ptr + m * N + n, tl.where(y != 0, factor * y * (dy - mean), 0.0), real)


@triton.jit
def _backward_wide(
    dy_ptr, y_ptr, dx_ptr, M, N, dy_stride, y_stride, scale, scale_low,
    DEPTH: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.arange(0, LANES)[None, :]
    tile = tl.arange(0, DEPTH)[:, None] * LANES + line
    tiled = N // (DEPTH * LANES) * (DEPTH * LANES)
    factor = tl.zeros([], ACC) + scale + scale_low
    for i in range(tl.program_id(0), M, tl.num_programs(0)):
        m = tl.zeros([1, 1], tl.int64) + i
        along = tl.zeros([LANES], ACC)
        mass = tl.zeros([LANES], ACC)
        for start in range(0, tiled, DEPTH * LANES):
            more, weight = _weigh(dy_ptr, y_ptr, m, start + tile, N, dy_stride, y_stride, True, ACC)
            along += more
            mass += weight
        for start in range(tiled, N, LANES):
            more, weight = _weigh(dy_ptr, y_ptr, m, start + line, N, dy_stride, y_stride, False, ACC)
            along += more
            mass += weight
        mean = tl.sum(along, axis=0) / tl.sum(mass, axis=0)
        for start in range(tiled, N, LANES):
            _pass(dy_ptr, y_ptr, dx_ptr, mean, factor, m, start + line, N, dy_stride, y_stride, False, ACC)
        for start in range(DEPTH * LANES, tiled + 1, DEPTH * LANES):
            _pass(dy_ptr, y_ptr, dx_ptr, mean, factor, m, tiled - start + tile, N, dy_stride, y_stride, True, ACC)


def forward(
    x: torch.Tensor, scale: float, mask: torch.Tensor | None, lengths: torch.Tensor | None,
    *, block_m: int | None = None, num_warps: int | None = None,
) -> tuple[torch.Tensor]:  # fmt: skip
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return (y,)
    rows = as_rows(x)
    M, N = rows.shape
    seen, fold = (None, (1, 1, 0, 0, 0, 1)) if mask is None else _fold(mask)
    limits = None if lengths is None else lengths.contiguous()  # one number a row: a copy costs nothing
    args = (rows, y, seen, limits, M, N, rows.stride(0), *_pair(abs(scale) * LOG2E), *fold)
    how: dict[str, Any] = {"SIGN": (scale > 0) - (scale < 0), "ACC": triton_acc(x.dtype)}
    if N > WHOLE:
        programs, warps = _wide(M, N * x.itemsize, num_sms(x.device), num_warps)
        depth = max(1, FLIGHT // x.itemsize // (1 if mask is None and lengths is None else 4))  # a mask takes registers
        _forward_wide[(programs,)](*args, DEPTH=depth, LANES=256 * warps, num_warps=warps, **how)
        return (y,)
    block_n, tail = _blocks(N)
    block_m = block_m or max(1, 4096 // block_n)
    warps = num_warps or min(max(block_m * block_n // 1024, 1), 32)
    _forward[(triton.cdiv(M, block_m),)](
        *args, EVEN=block_n <= N, BLOCK_M=block_m, BLOCK_N=block_n, TAIL=tail, num_warps=warps, **how
    )
    return (y,)


def backward(
    dy: torch.Tensor, y: torch.Tensor, scale: float, *, block_m: int | None = None, num_warps: int | None = None
) -> tuple[torch.Tensor]:
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    if not y.numel():
        return (dx,)
    dys, ys = as_rows(dy), as_rows(y)
    M, N = ys.shape
    args = (dys, ys, dx, M, N, dys.stride(0), ys.stride(0), *_pair(scale))
    if N > WHOLE_BACKWARD:
        programs, warps = _wide(M, 2 * N * y.itemsize, num_sms(y.device), num_warps)
        depth = max(1, FLIGHT // y.itemsize // (2 if N % 8 == 0 else 4))  # two tensors; unaligned, an address a value
        _backward_wide[(programs,)](*args, DEPTH=depth, LANES=256 * warps, ACC=triton_acc(y.dtype), num_warps=warps)
        return (dx,)
    block_n, tail = _blocks(N)
    block_m = block_m or max(1, 2048 // block_n)
    _backward[(triton.cdiv(M, block_m),)](
        *args, BLOCK_M=block_m, BLOCK_N=block_n, TAIL=tail, ACC=triton_acc(y.dtype),
        num_warps=num_warps or min(max(block_m * block_n // 512, 1), 32),
    )  # fmt: skip
    return (dx,)


def _blocks(N: int) -> tuple[int, int]:
    """The block that holds a row, or, where a quarter of it would be empty, two: 4,096 + 1,024 for 5,120 columns."""
    block = next_power_of_2(N)
    half, past = block // 2, N - block // 2
    return (half, max(next_power_of_2(past), 16)) if block >= 1024 and past <= half // 2 else (block, 0)


def _wide(M: int, row_bytes: int, sms: int, num_warps: int | None) -> tuple[int, int]:
    """Programs, and the warps of each, for rows that are walked: two a multiprocessor where the L2 holds their rows."""
    per_sm = 2 if 2 * sms * row_bytes <= L2_BYTES else 1
    return min(M, per_sm * sms), num_warps or 16 // per_sm


def _pair(value: float) -> tuple[float, float]:
    """A float as the sum of two fp32, since a kernel receives fp32 and an fp64 row deserves all of it."""
    high = ctypes.c_float(value).value
    return high, value - high if math.isfinite(high) else 0.0


def _fold(mask: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The mask as bytes, and how to find a row of it: the sizes of its two inner leading dims, three strides, a step.

    Dims that one stride can walk are joined: [T, S] under [B, H, T, S] becomes (B * H: 0, T: S). A mask that needs
    more than three, or whose columns are neither adjacent nor one value, is copied.
    """
    dims: list[tuple[int, int]] = []
    for size, stride in zip(mask.shape[:-1], mask.stride()[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if len(dims) > 3 or (mask.stride(-1) not in (0, 1) and mask.shape[-1] > 1):
        return _fold(mask.contiguous())
    outer, middle, inner = [(1, 0)] * (3 - len(dims)) + dims
    return mask.view(torch.uint8), (middle[0], inner[0], outer[1], middle[1], inner[1], mask.stride(-1))
