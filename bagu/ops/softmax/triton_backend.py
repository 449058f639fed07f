"""Softmax on Triton: one program owns whole rows, so x crosses memory once each way; memory is the limit.

A row of at most WHOLE columns stays in registers, 16 or 32 values a thread (of y and of dy in the backward): few warps
a row, so that many rows are in flight and one row's loads hide another's sums. odd_kernels has rows that begin
anywhere, wide_kernels those that are too long.

A mask is read through its own strides: [T, S] under [B, H, T, S] is never written out. Backward needs only y and dy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.launch import as_rows, blocks, fp32_pair, triton_acc
from bagu.ops.softmax.odd_kernels import odd_backward, odd_cut, odd_forward, registers
from bagu.ops.softmax.wide_kernels import exist, scores, wide_backward, wide_forward

WHOLE = 16384  # the longest block kept in registers; in fp64 the backward keeps half
LOG2E = 1.4426950408889634  # exp(x) = exp2(x * LOG2E): exp2 is one instruction, and the factor joins the scale
TUNABLE = {  # tests run each point
    "forward": {"block_m": (None, 1, 2, 4), "num_warps": (2, 4, 8)},
    "backward": {"block_m": (None, 1, 2, 4), "num_warps": (4, 8)},
}


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
    tl.store(y_ptr + m * N + n, y, (m < M) & exist(n, N, EVEN))


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
    x, keep = scores(x_ptr, mask_ptr, lengths_ptr, m, n, M, N, x_stride, fold, SIGN, EVEN, ACC)
    c = tl.zeros([], ACC) + c_high + c_low
    peak = tl.max(x, axis=1)  # it drops a NaN, the sum does not
    if TAIL:
        n_tail = BLOCK_N + tl.arange(0, TAIL)[None, :]
        tail, kept = scores(x_ptr, mask_ptr, lengths_ptr, m, n_tail, M, N, x_stride, fold, SIGN, False, ACC)
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
    c, sign = fp32_pair(abs(scale) * LOG2E), (scale > 0) - (scale < 0)
    plain = mask is None and lengths is None and block_m is None
    if plain and (cut := odd_cut(rows, rows, WHOLE)):
        odd_forward(rows, y, c, sign, cut, num_warps)
        return (y,)
    args = (rows, y, seen, limits, M, N, rows.stride(0), *c, *fold)
    if N > WHOLE:
        wide_forward(args, rows, mask is not None or lengths is not None, sign, num_warps)
        return (y,)
    block_n, tail = blocks(N, 0, 2)
    block_m = block_m or max(1, 4096 // block_n)
    _forward[(triton.cdiv(M, block_m),)](
        *args, SIGN=sign, EVEN=block_n <= N, BLOCK_M=block_m, BLOCK_N=block_n, TAIL=tail, ACC=triton_acc(x.dtype),
        num_warps=num_warps or min(max(block_m * block_n // 1024, 1), 4 if 0 < 4 * tail <= block_n else 32),
    )  # fmt: skip
    return (y,)


def backward(
    dy: torch.Tensor, y: torch.Tensor, scale: float, *, block_m: int | None = None, num_warps: int | None = None
) -> tuple[torch.Tensor]:
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    if not y.numel():
        return (dx,)
    dys, ys = as_rows(dy), as_rows(y)
    M, N = ys.shape
    heavy = max(y.itemsize // 4, 1)
    if block_m is None and (cut := odd_cut(dys, ys, WHOLE // heavy)):
        odd_backward(dys, ys, dx, fp32_pair(scale), cut, num_warps)
        return (dx,)
    args = (dys, ys, dx, M, N, dys.stride(0), ys.stride(0), *fp32_pair(scale))
    if N * heavy > WHOLE:
        wide_backward(args, dys, ys, num_warps)
        return (dx,)
    block_n, tail = blocks(N, 0, 2)
    block_m = block_m or max(1, 2048 // block_n)
    each = 1024 if 0 < 4 * tail <= block_n else 512  # a short tail leaves most threads of many warps without work
    warps = num_warps or min(max(block_m * block_n // each, 1), 8 if tail else 16)
    _backward[(triton.cdiv(M, block_m),)](
        *args, BLOCK_M=block_m, BLOCK_N=block_n, TAIL=tail, ACC=triton_acc(y.dtype), num_warps=warps,
        maxnreg=registers(block_m * block_n * heavy, warps),
    )  # fmt: skip
    return (dx,)


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
