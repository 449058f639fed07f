"""Norms of rows that do not fit in registers: each row is read twice, in blocks.

Forward computes mean and variance per lane in the first pass (LayerNorm by Welford's recurrence), and writes y in the
second. The backward of RMSNorm and LayerNorm has two kernels: `_row_means` computes mean(g) and mean(g * h) of each
row; `_columns` then computes dx, dw and db of some columns of some rows with one more read. ScaleNorm's backward has no
gradient per column, so one program makes both passes over its row. norms.py has the formulas.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.column_sum import column_sum
from bagu.ops.kernels.launch import num_sms, triton_acc
from bagu.ops.kernels.scalars import int64, reciprocal, rsqrt

ROWS, COLUMNS = 4, 1024  # the tile of `_columns`


@triton.jit
def _forward_wide(
    x_ptr, addend_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, kept_ptr, M, N, x_stride, addend_stride, eps,
    KIND: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m = int64(tl.program_id(0))
    n = tl.arange(0, BLOCK_N)[None, :]
    means = tl.zeros([1, BLOCK_N], ACC)
    squares = tl.zeros([1, BLOCK_N], ACC)
    for start in tl.range(0, N, BLOCK_N, num_stages=4):
        i = start + n
        s = tl.load(x_ptr + m * x_stride + i, i < N, 0.0, eviction_policy="evict_last")
        if addend_ptr is not None:
            addend = tl.load(addend_ptr + m * addend_stride + i, i < N, 0.0, eviction_policy="evict_last")
            s = (s.to(ACC) + addend.to(ACC)).to(s.dtype)
            tl.store(s_ptr + m * N + i, s, i < N)
        x = s.to(ACC)
        if KIND == "layer":
            deviation = tl.where(i < N, x - means, 0.0)
            means += deviation * (tl.full([], 1.0, ACC) / (start // BLOCK_N + 1))
            squares += deviation * (x - means)
        else:
            squares += x * x
    share = reciprocal(N, ACC)
    mean = 0.0
    if KIND == "layer":
        seen = ((N - n + BLOCK_N - 1) // BLOCK_N).to(ACC)  # the number of columns per lane; BLOCK_N < N
        mean = tl.sum(seen * means) * share
        squares += seen * (means - mean) * (means - mean)
        tl.store(mean_ptr + m, mean)
    total = tl.sum(squares)
    if KIND == "scale":
        kept = tl.sqrt(total)
        r = 1.0 / tl.where(kept < eps, eps, kept)  # tl.maximum would drop a NaN
    else:
        r = rsqrt(total * share + eps)
        kept = r
    tl.store(kept_ptr + m, kept)
    row = x_ptr + m * x_stride
    if addend_ptr is not None:
        row = s_ptr + m * N
        tl.debug_barrier()  # a thread may read a value that another thread wrote
    for start in tl.range(0, N, BLOCK_N, num_stages=2):
        i = start + n
        x = tl.load(row + i, i < N, 0.0, eviction_policy="evict_first").to(ACC)
        if KIND == "scale":
            w = tl.load(w_ptr).to(ACC)
        else:
            w = tl.load(w_ptr + i, i < N, 0.0).to(ACC)
        y = (x - mean) * r * w
        if b_ptr is not None:
            y += tl.load(b_ptr + i, i < N, 0.0).to(ACC)
        tl.store(y_ptr + m * N + i, y, i < N)


@triton.jit
def _row_means(
    dy_ptr, x_ptr, w_ptr, mean_ptr, r_ptr, level_ptr, along_ptr, N, dy_stride, x_stride,
    BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """mean(g) and mean(g * h) of a row."""
    m = int64(tl.program_id(0))
    mean = 0.0
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + m)
    n = tl.arange(0, BLOCK_N)
    level = tl.zeros([BLOCK_N], ACC)
    along = tl.zeros([BLOCK_N], ACC)
    for start in range(0, N, BLOCK_N):
        i = start + n
        dy = tl.load(dy_ptr + m * dy_stride + i, i < N, 0.0).to(ACC)
        x = tl.load(x_ptr + m * x_stride + i, i < N, 0.0).to(ACC)
        g = dy * tl.load(w_ptr + i, i < N, 0.0).to(ACC)
        level += g
        along += g * (x - mean)
    if mean_ptr is not None:
        tl.store(level_ptr + m, tl.sum(level) / N)
    tl.store(along_ptr + m, tl.load(r_ptr + m) * tl.sum(along) / N)


@triton.jit
def _columns(
    dy_ptr, ds_ptr, x_ptr, w_ptr, mean_ptr, r_ptr, level_ptr, along_ptr, dx_ptr, dw_ptr, db_ptr,
    M, N, dy_stride, ds_stride, x_stride, rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dx of BLOCK_N columns in `rows` rows, and their part of dw and db."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    w = tl.load(w_ptr + n, n < N, 0.0).to(ACC)
    dw, db = tl.zeros_like(w), tl.zeros_like(w)
    first = tl.program_id(1) * rows
    for start in range(first, min(first + rows, M), BLOCK_M):
        m = int64(start) + tl.arange(0, BLOCK_M)[:, None]
        exists = (m < M) & (n < N)
        r = tl.load(r_ptr + m, m < M, 0.0)
        along = tl.load(along_ptr + m, m < M, 0.0)
        dy = tl.load(dy_ptr + m * dy_stride + n, exists, 0.0, eviction_policy="evict_last").to(ACC)
        x = tl.load(x_ptr + m * x_stride + n, exists, 0.0, eviction_policy="evict_last").to(ACC)
        if mean_ptr is not None:
            x -= tl.load(mean_ptr + m, m < M, 0.0)
        h = x * r
        dx = dy * w - h * along
        if mean_ptr is not None:
            dx -= tl.load(level_ptr + m, m < M, 0.0)
        dx *= r
        if ds_ptr is not None:
            dx += tl.load(ds_ptr + m * ds_stride + n, exists, 0.0).to(ACC)
        tl.store(dx_ptr + m * N + n, dx, exists)
        dw += tl.sum(dy * h, axis=0)[None, :]
        db += tl.sum(dy, axis=0)[None, :]
    part = int64(tl.program_id(1)) * N
    tl.store(dw_ptr + part + n, dw, n < N)
    if db_ptr is not None:
        tl.store(db_ptr + part + n, db, n < N)


@triton.jit
def _scale_backward(
    dy_ptr, x_ptr, g_ptr, norm_ptr, dx_ptr, dg_ptr, N, dy_stride, x_stride, eps,
    BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m = int64(tl.program_id(0))
    n = tl.arange(0, BLOCK_N)
    products = tl.zeros([BLOCK_N], ACC)
    for start in tl.range(0, N, BLOCK_N, num_stages=4):
        i = start + n
        dy = tl.load(dy_ptr + m * dy_stride + i, i < N, 0.0, eviction_policy="evict_last").to(ACC)
        x = tl.load(x_ptr + m * x_stride + i, i < N, 0.0, eviction_policy="evict_last").to(ACC)
        products += dy * x
    norm = tl.load(norm_ptr + m)
    r = 1.0 / tl.where(norm < eps, eps, norm)
    along = tl.sum(products) * r
    tl.store(dg_ptr + m, along)
    pull = tl.where(norm < eps, 0.0, along * r)
    g = tl.load(g_ptr).to(ACC)
    for start in tl.range(0, N, BLOCK_N, num_stages=2):
        i = start + n
        dy = tl.load(dy_ptr + m * dy_stride + i, i < N, 0.0, eviction_policy="evict_first").to(ACC)
        x = tl.load(x_ptr + m * x_stride + i, i < N, 0.0, eviction_policy="evict_first").to(ACC)
        tl.store(dx_ptr + m * N + i, g * r * (dy - x * pull), i < N)


def _two_passes(x: torch.Tensor) -> dict[str, Any]:
    """The launch options of a kernel that makes two passes over a row: small programs, one per row.

    On an H200 they reach 0.61 of copy bandwidth at 1024 x 131,072. One program of 16 warps per multiprocessor, whose
    rows stay in L2 for the second pass, reaches 0.47.
    """
    return {"BLOCK_N": 2048 // max(x.element_size() // 4, 1), "ACC": triton_acc(x.dtype), "num_warps": 4}


def wide_forward(args: tuple[Any, ...], x: torch.Tensor, kind: str) -> None:
    """Launch the forward of rows x[M, N] with the arguments of `_forward_wide`."""
    _forward_wide[(len(x),)](*args, KIND=kind, **_two_passes(x))


def wide_backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    x: torch.Tensor,
    w: torch.Tensor,
    mean: torch.Tensor | None,
    r: torch.Tensor,
    dx: torch.Tensor,
    outputs: int,
) -> torch.Tensor:
    """Write dx of x[M, N] and return [outputs, P, N]: the partial dw, and the partial db if there are two outputs."""
    (M, N), acc, along = x.shape, triton_acc(x.dtype), torch.empty_like(r)
    level = None if mean is None else torch.empty_like(r)
    strides = dy.stride(0), x.stride(0)
    _row_means[(M,)](dy, x, w, mean, r, level, along, N, *strides, BLOCK_N=4096, ACC=acc, num_warps=8)
    across, tiles = triton.cdiv(N, COLUMNS), triton.cdiv(M, ROWS)
    parts = min(tiles, triton.cdiv(16 * num_sms(x.device), across))  # about 16 programs per multiprocessor
    partial = torch.empty(outputs, parts, N, dtype=r.dtype, device=x.device)
    _columns[(across, parts)](
        dy, ds, x, w, mean, r, level, along, dx, partial[0], partial[1] if outputs == 2 else None,
        M, N, dy.stride(0), 0 if ds is None else ds.stride(0), x.stride(0), ROWS * triton.cdiv(tiles, parts),
        BLOCK_M=ROWS, BLOCK_N=COLUMNS, ACC=acc, num_warps=4,
    )  # fmt: skip
    return partial


def wide_scale_backward(
    dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor, norm: torch.Tensor, dx: torch.Tensor, eps: float
) -> torch.Tensor:
    """Write dx of x[M, N] and return dg."""
    partial = torch.empty(len(x), 1, dtype=norm.dtype, device=x.device)
    _scale_backward[(len(x),)](
        dy, x, g, norm, dx, partial, x.shape[1], dy.stride(0), x.stride(0), eps, **_two_passes(x)
    )
    return column_sum(partial, g.dtype)
