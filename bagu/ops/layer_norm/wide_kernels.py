"""LayerNorm of rows that do not fit a program.

Forward they are walked twice, first for mean and variance lane by lane (Welford). Backward they cost x and dy twice:
`_levels` finds the two means of each row, then `_columns` owns some features of some rows and has dx, dw and db from
one more read. Odd rows (VEC > 0) are cut as RMSNorm's are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.kernels import apart, int64, read_apart, reciprocal, rsqrt, shifted
from bagu.ops.launch import num_sms, splits, triton_acc, walk

__all__ = ["gradient", "run_backward", "run_forward"]


@triton.jit
def gradient(dy_ptr, x_ptr, w, mean, rstd, dy_row, x_row, n, real, ACC: tl.constexpr):
    """dy, the normalised h and g = dy * w."""
    dy = tl.load(dy_ptr + dy_row + n, real, 0.0, eviction_policy="evict_last").to(ACC)
    x = tl.load(x_ptr + x_row + n, real, 0.0, eviction_policy="evict_last").to(ACC)
    return dy, (x - mean) * rstd, dy * w


@triton.jit
def _forward_wide(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, N, x_stride, step, eps,
    BLOCK_N: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m = int64(tl.program_id(0))
    first, head, body = m * N, 0, N
    x_row, row = m * x_stride, first
    if VEC:
        head, body, at, end = apart(m, N, BLOCK_N, 2 * VEC, VEC)
        row = tl.multiple_of(first + head, VEC)
        x_row = row
        end_x = tl.load(x_ptr + first + at, end, 0.0).to(ACC)
    n = tl.arange(0, BLOCK_N)[None, :]
    means = tl.zeros([1, BLOCK_N], ACC)
    squares = tl.zeros([1, BLOCK_N], ACC)
    for start in tl.range(0, body, BLOCK_N, num_stages=4):
        i = start + n
        x = tl.load(x_ptr + x_row + i, i < body, 0.0, eviction_policy="evict_last").to(ACC)
        off = tl.where(i < body, x - means, 0.0)
        means += off * (tl.full([], 1.0, ACC) / (start // BLOCK_N + 1))
        squares += off * (x - means)
    seen = ((body - n + BLOCK_N - 1) // BLOCK_N).to(ACC)  # how many features each lane met; BLOCK_N < body
    share = reciprocal(N, ACC)
    total = tl.sum(seen * means)
    if VEC:
        total += tl.sum(end_x)
    mean = total * share
    spread = tl.sum(squares + seen * (means - mean) * (means - mean))
    if VEC:
        end_x = tl.where(end, end_x - mean, 0.0)
        spread += tl.sum(end_x * end_x)
    rstd = rsqrt(spread * share + eps)
    tl.store(mean_ptr + m, mean)
    tl.store(rstd_ptr + m, rstd)
    for start in tl.range(0, body, BLOCK_N, num_stages=2):
        i = start + n
        x = tl.load(x_ptr + x_row + i, i < body, 0.0, eviction_policy="evict_first").to(ACC)
        y = (x - mean) * rstd * tl.load(w_ptr + head * step + i, i < body, 0.0).to(ACC)
        if b_ptr is not None:
            y += tl.load(b_ptr + head * step + i, i < body, 0.0).to(ACC)
        tl.store(y_ptr + row + i, y, i < body)
    if VEC:
        end_y = end_x * rstd * tl.load(w_ptr + at, end, 0.0).to(ACC)
        if b_ptr is not None:
            end_y += tl.load(b_ptr + at, end, 0.0).to(ACC)
        tl.store(y_ptr + first + at, end_y, end)


@triton.jit
def _levels(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, level_ptr, along_ptr, M, N, dy_stride, x_stride, step,
    BLOCK_N: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m = int64(tl.program_id(0))
    mean = tl.load(mean_ptr + m)
    dy_row, x_row, head, body = m * dy_stride, m * x_stride, 0, N
    if VEC:
        head, body, at, end = apart(m, N, BLOCK_N, 2 * VEC, VEC)
        dy_row = tl.multiple_of(m * N + head, VEC)
        x_row = dy_row
        end_g = read_apart(dy_ptr, m, M, N, at, end).to(ACC) * tl.load(w_ptr + at, end, 0.0).to(ACC)
        end_x = read_apart(x_ptr, m, M, N, at, end).to(ACC)
    n = tl.arange(0, BLOCK_N)
    level = tl.zeros([BLOCK_N], ACC)
    along = tl.zeros([BLOCK_N], ACC)
    for start in range(0, body, BLOCK_N):
        i = start + n
        dy = tl.load(dy_ptr + dy_row + i, i < body, 0.0).to(ACC)
        x = tl.load(x_ptr + x_row + i, i < body, 0.0).to(ACC)
        g = dy * tl.load(w_ptr + head * step + i, i < body, 0.0).to(ACC)
        level += g
        along += g * (x - mean)
    levels, alongs = tl.sum(level), tl.sum(along)
    if VEC:
        levels += tl.sum(end_g)
        alongs += tl.sum(end_g * (end_x - mean))
    tl.store(level_ptr + m, levels / N)
    tl.store(along_ptr + m, tl.load(rstd_ptr + m) * alongs / N)


@triton.jit
def _some(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, level_ptr, along_ptr, dx_ptr, dw_ptr, db_ptr,
    M, N, dy_stride, x_stride, ROWS, head, n, inside,
    STEP: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dx of the features head + n[1, …] in this program's rows, every STEP-th of them, and their part of dw and db."""
    w = tl.load(w_ptr + head + n, inside, 0.0).to(ACC)
    dw, db = tl.zeros_like(w), tl.zeros_like(w)
    mine, residue = tl.program_id(1) // STEP * ROWS, tl.program_id(1) % STEP
    for start in range(mine, min(mine + ROWS, tl.cdiv(M - residue, STEP)), BLOCK_M):
        m = (int64(start) + tl.arange(0, BLOCK_M)[:, None]) * STEP + residue
        real = (m < M) & inside
        dy_row, x_row, row = m * dy_stride + head, m * x_stride + head, m * N + head
        if ALIGNED:
            row = tl.multiple_of(row, [STEP, STEP])
            dy_row, x_row = row, row
        mean = tl.load(mean_ptr + m, m < M, 0.0)
        rstd = tl.load(rstd_ptr + m, m < M, 0.0)
        level = tl.load(level_ptr + m, m < M, 0.0)
        along = tl.load(along_ptr + m, m < M, 0.0)
        dy, h, g = gradient(dy_ptr, x_ptr, w, mean, rstd, dy_row, x_row, n, real, ACC)
        tl.store(dx_ptr + row + n, rstd * (g - level - h * along), real)
        dw += tl.sum(dy * h, axis=0)[None, :]
        db += tl.sum(dy, axis=0)[None, :]
    part = int64(tl.program_id(1)) * N + head
    tl.store(dw_ptr + part + n, dw, inside)
    if db_ptr is not None:
        tl.store(db_ptr + part + n, db, inside)


@triton.jit
def _columns(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, level_ptr, along_ptr, dx_ptr, dw_ptr, db_ptr,
    M, N, dy_stride, x_stride, ROWS,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if VEC:
        head, body, at, end = apart(int64(tl.program_id(1) % VEC), N, BLOCK_N, 2 * VEC, VEC)
        if tl.program_id(0) == tl.num_programs(0) - 1:
            _some(
                dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, level_ptr, along_ptr, dx_ptr, dw_ptr, db_ptr,
                M, N, dy_stride, x_stride, ROWS, 0, at, end, VEC, False, BLOCK_M, ACC,
            )  # fmt: skip
        else:
            _some(
                dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, level_ptr, along_ptr, dx_ptr, dw_ptr, db_ptr,
                M, N, dy_stride, x_stride, ROWS, head, n, n < body, VEC, True, BLOCK_M, ACC,
            )  # fmt: skip
    else:
        _some(
            dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, level_ptr, along_ptr, dx_ptr, dw_ptr, db_ptr,
            M, N, dy_stride, x_stride, ROWS, 0, n, n < N, 1, False, BLOCK_M, ACC,
        )  # fmt: skip


def run_forward(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None,
    y: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, eps: float, vec: int,
) -> None:  # fmt: skip
    """Write y, mean and rstd of x[M, N]."""
    M, N = x.shape
    w, b, step = shifted(w, b, vec, M)
    _forward_wide[(M,)](x, w, b, y, mean, rstd, N, x.stride(0), step, eps, VEC=vec, ACC=triton_acc(x.dtype), **walk(x))


def run_backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None,
    mean: torch.Tensor, rstd: torch.Tensor, dx: torch.Tensor, vec: int,
) -> torch.Tensor:  # fmt: skip
    """Write dx of x[M, N]; [1 or 2, P, N], the parts of dw and, with a bias, of db."""
    (M, N), acc, strides = x.shape, triton_acc(x.dtype), (dy.stride(0), x.stride(0))
    level, along = torch.empty_like(rstd), torch.empty_like(rstd)
    gains, _, step = shifted(w, None, vec, M)
    _levels[(M,)](
        dy, x, gains, mean, rstd, level, along, M, N, *strides, step, BLOCK_N=4096, VEC=vec, ACC=acc, num_warps=8
    )  # fmt: skip
    grid, rows = splits(M, N, vec, num_sms(x.device))
    partial = torch.empty(1 if b is None else 2, grid[1], N, dtype=rstd.dtype, device=x.device)
    dw, db = partial[0], None if b is None else partial[1]
    _columns[grid](
        dy, x, w, mean, rstd, level, along, dx, dw, db, M, N, *strides, rows,
        BLOCK_M=4, BLOCK_N=1024, VEC=vec, ACC=acc, num_warps=4,
    )  # fmt: skip
    return partial
