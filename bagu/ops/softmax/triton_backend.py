"""Softmax on Triton: one program owns whole rows, so x is read once and y is written once; memory is the limit.

A row of at most MAX_COLUMNS columns stays in registers, 16 or 32 values per thread (of y and of dy in the backward).
There are few warps per row, so that many rows are in flight and one row's loads hide another's sums. wide_kernels
handles longer rows.

A mask is read through its own strides: [T, S] under [B, H, T, S] is never expanded. Backward needs only y and dy.
"""

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.launch import as_rows, fp32_pair, split_row, triton_acc
from bagu.ops.kernels.rows import columns, load_row, masks, max_row, multiply, row_ids, select, store_row, sum_row
from bagu.ops.kernels.scalars import int64
from bagu.ops.softmax.wide_kernels import scores, wide_backward, wide_forward

MAX_COLUMNS = 16384  # per row kept in registers; in fp64 the backward keeps half
LOG2E = 1.4426950408889634  # exp(x) = exp2(x * LOG2E): exp2 is one instruction, and the factor is part of the scale
TUNABLE = {  # the tests run every combination
    "forward": {"block_m": (None, 1, 2, 4), "num_warps": (2, 4, 8)},
    "backward": {"block_m": (None, 1, 2, 4), "num_warps": (4, 8)},
}


@triton.jit
def _score_row(x_ptr, mask_ptr, lengths_ptr, m, n, exists, M, N, x_stride, fold, SIGN: tl.constexpr, ACC: tl.constexpr):
    """`scores` of a row: its x, and which columns are visible."""
    x, keep = scores(x_ptr, mask_ptr, lengths_ptr, m, n[0], exists[0], M, N, x_stride, fold, SIGN, ACC)
    if len(n) == 2:
        tail, kept = scores(x_ptr, mask_ptr, lengths_ptr, m, n[1], exists[1], M, N, x_stride, fold, SIGN, ACC)
        return (x, tail), (keep, kept)
    else:
        return (x,), (keep,)


@triton.jit
def _forward(
    x_ptr, y_ptr, mask_ptr, lengths_ptr, M, N, x_stride, c_high, c_low,
    middle, inner, outer_stride, middle_stride, inner_stride, step,
    SIGN: tl.constexpr, FULL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    fold = (middle, inner, outer_stride, middle_stride, inner_stride, step)
    m, n = row_ids(int64(tl.program_id(0)), BLOCK_M), columns(BLOCK_N, TAIL)
    exists = masks(m, n, M, N, FULL)
    x, keep = _score_row(x_ptr, mask_ptr, lengths_ptr, m, n, exists, M, N, x_stride, fold, SIGN, ACC)
    c = tl.zeros([], ACC) + c_high + c_low
    peak = max_row(x)  # max ignores NaN, the sum does not
    e = [tl.exp2((v - peak) * c) for v in x]
    if SIGN == 0:  # a scale of 0 times a masked -inf is NaN
        e = select(keep, e)
    r = 1.0 / sum_row(e)
    y = [v * r for v in e]
    if mask_ptr is not None or lengths_ptr is not None:
        y = select(keep, y)
    store_row(y_ptr, m, n, exists, N, y)


@triton.jit
def _backward(
    dy_ptr, y_ptr, dx_ptr, M, N, dy_stride, y_stride, scale, scale_low,
    FULL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m, n = row_ids(int64(tl.program_id(0)), BLOCK_M), columns(BLOCK_N, TAIL)
    exists = masks(m, n, M, N, FULL)
    y = [v.to(ACC) for v in load_row(y_ptr, m, n, exists, y_stride)]
    dy = [v.to(ACC) for v in load_row(dy_ptr, m, n, exists, dy_stride)]
    seen = [v != 0 for v in y]
    dy = select(seen, dy)
    mean = sum_row(multiply(dy, y)) / sum_row(y)  # divided by the sum of the rounded y: see torch_backend.py
    factor = tl.zeros([], ACC) + scale + scale_low
    dx = multiply([factor * v for v in y], [v - mean for v in dy])
    store_row(dx_ptr, m, n, exists, N, select(seen, dx))


def forward(
    x: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    lengths: torch.Tensor | None,
    *,
    block_m: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return (y,)
    rows = as_rows(x)
    M, N = rows.shape
    seen, fold = (None, (1, 1, 0, 0, 0, 1)) if mask is None else _fold(mask)
    limits = None if lengths is None else lengths.contiguous()  # one number per row: a copy is cheap
    c, sign = fp32_pair(abs(scale) * LOG2E), (scale > 0) - (scale < 0)
    args = (rows, y, seen, limits, M, N, rows.stride(0), *c, *fold)
    if N > MAX_COLUMNS:
        wide_forward(args, rows, mask is not None or lengths is not None, sign, num_warps)
        return (y,)
    block_n, tail = split_row(N, 2)
    block_m = block_m or max(1, 4096 // block_n)
    _forward[(triton.cdiv(M, block_m),)](
        *args,
        SIGN=sign,
        FULL=block_n <= N,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        TAIL=tail,
        ACC=triton_acc(x.dtype),
        num_warps=num_warps or min(max(block_m * block_n // 1024, 1), 4 if 0 < 4 * tail <= block_n else 32),
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
    heavy = max(y.itemsize // 4, 1)
    args = (dys, ys, dx, M, N, dys.stride(0), ys.stride(0), *fp32_pair(scale))
    if N * heavy > MAX_COLUMNS:
        wide_backward(args, ys, num_warps)
        return (dx,)
    block_n, tail = split_row(N, 2)
    block_m = block_m or max(1, 2048 // block_n)
    each = 1024 if 0 < 4 * tail <= block_n else 512  # with a short tail, most threads of many warps have no work
    warps = num_warps or min(max(block_m * block_n // each, 1), 8 if tail else 16)
    _backward[(triton.cdiv(M, block_m),)](
        *args,
        FULL=block_n <= N,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        TAIL=tail,
        ACC=triton_acc(y.dtype),
        num_warps=warps,
        maxnreg=_registers(block_m * block_n * heavy, warps),
    )
    return (dx,)


def _registers(block: int, warps: int) -> int:
    """A thread's registers in the backward: 64 for 16 values of y and of dy, so that two rows of 8,192 fit on one
    multiprocessor. ptxas would take 77, and only one row would run: 0.73 of copy bandwidth instead of 0.94.

    More values get proportionally more registers, up to the hardware's limit.
    """
    return min(64 * max(block // (512 * warps), 1), 65536 // (32 * warps), 255)


def _fold(mask: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The mask as bytes, and the index of a row in it: the sizes of its two inner leading dims, three strides, a step.

    Dims that one stride covers are merged: [T, S] under [B, H, T, S] becomes (B * H: 0, T: S). A mask that needs
    more than three strides, or whose columns are neither adjacent nor one value, is copied.
    """
    dims: list[tuple[int, int]] = []
    step = mask.stride(-1)
    for size, stride in zip(mask.shape[:-1], mask.stride()[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if len(dims) > 3 or (step not in (0, 1) and mask.shape[-1] > 1):
        return _fold(mask.contiguous())
    outer, middle, inner = [(1, 0)] * (3 - len(dims)) + dims
    return mask.view(torch.uint8), (middle[0], inner[0], outer[1], middle[1], inner[1], step)
