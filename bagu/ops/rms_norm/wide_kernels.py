"""RMSNorm of rows that do not fit a program: walked twice forward; backward they cost x and dy twice.

`_pulls` finds each row's mean, then `_columns` owns some features of some rows and has dx and dw from one more read.
Of odd rows (VEC > 0) bodies are walked and ends are apart. Every VEC-th row begins alike, so a program of `_columns`
has only such rows: its features are aligned in each of them. The last program of a split has the ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.kernels import apart, column_sum, int64, read_apart, reciprocal, rsqrt, shifted
from bagu.ops.launch import num_sms, splits, triton_acc, walk

__all__ = ["add", "run_backward", "run_forward", "write"]


@triton.jit
def add(x_ptr, addend_ptr, x_row, addend_row, n, real, ACC: tl.constexpr):
    """x, or x + addend as s will hold it."""
    x = tl.load(x_ptr + x_row + n, real, 0.0, eviction_policy="evict_last")
    if addend_ptr is not None:
        addend = tl.load(addend_ptr + addend_row + n, real, 0.0, eviction_policy="evict_last")
        x = (x.to(ACC) + addend.to(ACC)).to(x.dtype)
    return x


@triton.jit
def write(dx_ptr, ds_ptr, dx, row, ds_row, n, real):
    """dx, with ds where there is one."""
    if ds_ptr is not None:
        dx += tl.load(ds_ptr + ds_row + n, real, 0.0).to(dx.dtype)
    tl.store(dx_ptr + row + n, dx, real)


@triton.jit
def _forward_wide(
    x_ptr, addend_ptr, w_ptr, y_ptr, s_ptr, r_ptr, N, x_stride, addend_stride, w_step, eps,
    BLOCK_N: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m = int64(tl.program_id(0))
    first, head, body = m * N, 0, N
    x_row, addend_row, row = m * x_stride, m * addend_stride, first
    if VEC:
        head, body, at, end = apart(m, N, BLOCK_N, 2 * VEC, VEC)
        row = tl.multiple_of(first + head, VEC)
        x_row, addend_row = row, row
        ends = add(x_ptr, addend_ptr, first, first, at, end, ACC)
        if addend_ptr is not None:
            tl.store(s_ptr + first + at, ends, end)
        end_x = ends.to(ACC)
    n = tl.arange(0, BLOCK_N)[None, :]
    squares = tl.zeros([1, BLOCK_N], ACC)
    for start in tl.range(0, body, BLOCK_N, num_stages=4):
        i = start + n
        real = i < body
        x = add(x_ptr, addend_ptr, x_row, addend_row, i, real, ACC)
        if addend_ptr is not None:
            tl.store(s_ptr + row + i, x, real)
        squares += x.to(ACC) * x.to(ACC)
    total = tl.sum(squares)
    if VEC:
        total += tl.sum(end_x * end_x)
    r = rsqrt(total * reciprocal(N, ACC) + eps)
    tl.store(r_ptr + m, r)
    source = x_ptr + x_row
    if addend_ptr is not None:
        source = s_ptr + row
        tl.debug_barrier()  # a thread may read what another one wrote
    for start in tl.range(0, body, BLOCK_N, num_stages=2):
        i = start + n
        x = tl.load(source + i, i < body, 0.0, eviction_policy="evict_first").to(ACC)
        w = tl.load(w_ptr + head * w_step + i, i < body, 0.0).to(ACC)
        tl.store(y_ptr + row + i, x * r * w, i < body)
    if VEC:
        tl.store(y_ptr + first + at, end_x * r * tl.load(w_ptr + at, end, 0.0).to(ACC), end)


@triton.jit
def _pulls(
    dy_ptr, x_ptr, w_ptr, r_ptr, pull_ptr, M, N, dy_stride, x_stride, w_step,
    BLOCK_N: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m = int64(tl.program_id(0))
    dy_row, x_row, head, body = m * dy_stride, m * x_stride, 0, N
    if VEC:
        head, body, at, end = apart(m, N, BLOCK_N, 2 * VEC, VEC)
        dy_row = tl.multiple_of(m * N + head, VEC)
        x_row = dy_row
        end_dy, end_x = read_apart(dy_ptr, m, M, N, at, end).to(ACC), read_apart(x_ptr, m, M, N, at, end).to(ACC)
        end_w = tl.load(w_ptr + at, end, 0.0).to(ACC)
    n = tl.arange(0, BLOCK_N)
    along = tl.zeros([BLOCK_N], ACC)
    for start in range(0, body, BLOCK_N):
        i = start + n
        dy = tl.load(dy_ptr + dy_row + i, i < body, 0.0).to(ACC)
        x = tl.load(x_ptr + x_row + i, i < body, 0.0).to(ACC)
        along += dy * tl.load(w_ptr + head * w_step + i, i < body, 0.0).to(ACC) * x
    total = tl.sum(along)
    if VEC:
        total += tl.sum(end_dy * end_w * end_x)
    r = tl.load(r_ptr + m)
    tl.store(pull_ptr + m, r * r * total / N)


@triton.jit
def _some(
    dy_ptr, ds_ptr, x_ptr, w_ptr, r_ptr, pull_ptr, dx_ptr, dw_ptr, M, N, dy_stride, ds_stride, x_stride, ROWS,
    head, n, inside, STEP: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dx of the features head + n[1, …] in this program's rows, every STEP-th of them, and their part of dw."""
    w = tl.load(w_ptr + head + n, inside, 0.0).to(ACC)
    dw = tl.zeros_like(w)
    mine, residue = tl.program_id(1) // STEP * ROWS, tl.program_id(1) % STEP
    for start in range(mine, min(mine + ROWS, tl.cdiv(M - residue, STEP)), BLOCK_M):
        m = (int64(start) + tl.arange(0, BLOCK_M)[:, None]) * STEP + residue
        real = (m < M) & inside
        dy_row, ds_row, x_row, row = m * dy_stride + head, m * ds_stride + head, m * x_stride + head, m * N + head
        if ALIGNED:
            row = tl.multiple_of(row, [STEP, STEP])
            dy_row, ds_row, x_row = row, row, row
        dy = tl.load(dy_ptr + dy_row + n, real, 0.0).to(ACC)
        x = tl.load(x_ptr + x_row + n, real, 0.0).to(ACC)
        r = tl.load(r_ptr + m, m < M, 0.0)
        pull = tl.load(pull_ptr + m, m < M, 0.0)
        write(dx_ptr, ds_ptr, r * (dy * w - x * pull), row, ds_row, n, real)
        dw += tl.sum(dy * x * r, axis=0)[None, :]
    tl.store(dw_ptr + int64(tl.program_id(1)) * N + head + n, dw, inside)


@triton.jit
def _columns(
    dy_ptr, ds_ptr, x_ptr, w_ptr, r_ptr, pull_ptr, dx_ptr, dw_ptr, M, N, dy_stride, ds_stride, x_stride, ROWS,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if VEC:
        head, body, at, end = apart(int64(tl.program_id(1) % VEC), N, BLOCK_N, 2 * VEC, VEC)
        if tl.program_id(0) == tl.num_programs(0) - 1:
            _some(
                dy_ptr, ds_ptr, x_ptr, w_ptr, r_ptr, pull_ptr, dx_ptr, dw_ptr, M, N, dy_stride, ds_stride, x_stride,
                ROWS, 0, at, end, VEC, False, BLOCK_M, ACC,
            )  # fmt: skip
        else:
            _some(
                dy_ptr, ds_ptr, x_ptr, w_ptr, r_ptr, pull_ptr, dx_ptr, dw_ptr, M, N, dy_stride, ds_stride, x_stride,
                ROWS, head, n, n < body, VEC, True, BLOCK_M, ACC,
            )  # fmt: skip
    else:
        _some(
            dy_ptr, ds_ptr, x_ptr, w_ptr, r_ptr, pull_ptr, dx_ptr, dw_ptr, M, N, dy_stride, ds_stride, x_stride,
            ROWS, 0, n, n < N, 1, False, BLOCK_M, ACC,
        )  # fmt: skip


def run_forward(
    x: torch.Tensor, addend: torch.Tensor | None, w: torch.Tensor,
    y: torch.Tensor, s: torch.Tensor | None, r: torch.Tensor, eps: float, vec: int,
) -> None:  # fmt: skip
    """Write y and r of x[M, N], and s where there is an addend."""
    M, N = x.shape
    strides = x.stride(0), 0 if addend is None else addend.stride(0)
    w, _, step = shifted(w, None, vec, M)
    _forward_wide[(M,)](x, addend, w, y, s, r, N, *strides, step, eps, VEC=vec, ACC=triton_acc(x.dtype), **walk(x))


def run_backward(
    dy: torch.Tensor, ds: torch.Tensor | None, x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, dx: torch.Tensor,
    vec: int,
) -> torch.Tensor:  # fmt: skip
    """Write dx of x[M, N]; dw."""
    (M, N), acc = x.shape, triton_acc(x.dtype)
    pull = torch.empty_like(r)
    gains, _, step = shifted(w, None, vec, M)
    _pulls[(M,)](
        dy, x, gains, r, pull, M, N, dy.stride(0), x.stride(0), step, BLOCK_N=4096, VEC=vec, ACC=acc, num_warps=8
    )  # fmt: skip
    grid, rows = splits(M, N, vec, num_sms(x.device))
    partial = torch.empty(grid[1], N, dtype=r.dtype, device=x.device)
    _columns[grid](
        dy, ds, x, w, r, pull, dx, partial, M, N, dy.stride(0), 0 if ds is None else ds.stride(0), x.stride(0), rows,
        BLOCK_M=4, BLOCK_N=1024, VEC=vec, ACC=acc, num_warps=4,
    )  # fmt: skip
    return column_sum(partial, w.dtype)
