"""LayerNorm on Triton: one program owns whole rows, so x crosses memory once each way; memory is the limit.

The mean is taken first and the squared deviations from it second, both from registers, so a large mean costs the
variance no digits. In the backward programs are few and have many rows each: w, dw and db stay in registers, and the
next rows are copied to shared memory two ahead (num_stages), which keeps bytes in flight while a row is being reduced.
Rows of an odd N are cut into an aligned body and its ends (VEC > 0) as RMSNorm's are.

Forward rows past WHOLE are walked twice, first for mean and variance lane by lane (Welford). Backward rows past
WHOLE_BACKWARD cost x and dy twice: `_levels` finds the two means of each row, then `_columns` owns some features of
all rows and has dx, dw and db from one more read.

Backward, with h = (x - mean) * rstd and g = dy * w, and no atomics, so the same inputs give the same bits:

    dx = rstd * (g - mean_n(g) - h * mean_n(g * h))        dw = sum_m dy * h        db = sum_m dy
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.kernels import column_sum, column_sums, int64, reciprocal, rsqrt
from bagu.ops.launch import as_rows, next_power_of_2, num_sms, triton_acc
from bagu.ops.rms_norm.triton_backend import body_block, ends, vector, walk
from bagu.ops.signature import accumulator

WHOLE = 16384  # forward: the longest row kept in registers, 32 values a thread at 16 warps
WHOLE_BACKWARD = 8192  # w, dw, db, x and dy are 16 values a thread each; at 16,384 ptxas spills
TUNABLE = {  # tests run each point
    "forward": {"block_m": (1, 2), "programs_per_sm": (None, 2), "num_warps": (4, 8)},
    "backward": {"programs_per_sm": (1, 2), "num_warps": (4, 8, 16)},
}


@triton.jit
def _mean(total, N, share):
    """total / N within an ulp, from share = 1 / N: the remainder, exact in a fused multiply-add, is shared out too.

    A rounded division is slower (every row waits for it), and so is a second sum over the row, of what is left of it.
    """
    mean = total * share
    return mean + tl.fma(-mean, tl.zeros_like(mean) + N, total) * share


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, M, N, x_stride, eps, trips,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    head, body = 0, N
    if VEC:
        head, body, at, end = ends(N, VEC)
        end_w = tl.load(w_ptr + at, end, 0.0).to(ACC)
    n = tl.arange(0, BLOCK_N)[None, :]
    inside = EVEN | (n < body)
    w = tl.load(w_ptr + head + n, inside, 0.0).to(ACC)
    if b_ptr is not None:
        b = tl.load(b_ptr + head + n, inside, 0.0).to(ACC)
        if VEC:
            end_b = tl.load(b_ptr + at, end, 0.0).to(ACC)
    share = reciprocal(N, ACC)
    for i in tl.range(0, trips, num_stages=3):
        tile = int64(i) * tl.num_programs(0) + tl.program_id(0)
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        x_row, row = m * x_stride, m * N
        if VEC:  # contiguous, one row at a time
            row = tl.multiple_of(tile * N + head, VEC)
            x_row = row
        real = (m < M) & inside
        x = tl.load(x_ptr + x_row + n, real, 0.0, eviction_policy="evict_last").to(ACC)
        if VEC:
            first, last = m * N, end & (m < M)
            end_x = tl.load(x_ptr + first + at, last, 0.0).to(ACC)
            mean = _mean(tl.sum(x) + tl.sum(end_x), N, share)
            end_x = tl.where(end, end_x - mean, 0.0)
            x = tl.where(n < body, x - mean, 0.0)
            variance = (tl.sum(x * x) + tl.sum(end_x * end_x)) * share
        elif EVEN:  # N is a power of two: `share` is exact, and so is the mean's rounding
            mean = tl.sum(x, axis=1)[:, None] * share
            x = x - mean
            variance = tl.sum(x * x, axis=1)[:, None] * share
        else:
            mean = _mean(tl.sum(x, axis=1)[:, None], N, share)
            x = tl.where(n < N, x - mean, 0.0)
            variance = tl.sum(x * x, axis=1)[:, None] * share
        rstd = rsqrt(variance + eps)
        tl.store(mean_ptr + m, tl.zeros([BLOCK_M, 1], ACC) + mean, m < M)
        tl.store(rstd_ptr + m, tl.zeros([BLOCK_M, 1], ACC) + rstd, m < M)
        y = x * rstd * w
        if b_ptr is not None:
            y += b
        tl.store(y_ptr + row + n, y, real)
        if VEC:
            end_y = end_x * rstd * end_w
            if b_ptr is not None:
                end_y += end_b
            tl.store(y_ptr + first + at, end_y, last)


@triton.jit
def _forward_wide(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, N, x_stride, eps,
    BLOCK_N: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    m = int64(tl.program_id(0))
    first, head, body = m * N, 0, N
    x_row, row = m * x_stride, first
    if VEC:
        head, body, at, end = ends(N, VEC)
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
        squares += tl.where(i < body, off * (x - means), 0.0)
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
        y = (x - mean) * rstd * tl.load(w_ptr + head + i, i < body, 0.0).to(ACC)
        if b_ptr is not None:
            y += tl.load(b_ptr + head + i, i < body, 0.0).to(ACC)
        tl.store(y_ptr + row + i, y, i < body)
    if VEC:
        end_y = end_x * rstd * tl.load(w_ptr + at, end, 0.0).to(ACC)
        if b_ptr is not None:
            end_y += tl.load(b_ptr + at, end, 0.0).to(ACC)
        tl.store(y_ptr + first + at, end_y, end)


@triton.jit
def _gradient(dy_ptr, x_ptr, w, mean, rstd, dy_row, x_row, n, real, ACC: tl.constexpr):
    """dy, the normalised h and g = dy * w."""
    dy = tl.load(dy_ptr + dy_row + n, real, 0.0, eviction_policy="evict_last").to(ACC)
    x = tl.load(x_ptr + x_row + n, real, 0.0, eviction_policy="evict_last").to(ACC)
    return dy, (x - mean) * rstd, dy * w


@triton.jit
def _backward(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, M, N, dy_stride, x_stride, trips,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    head, body = 0, N
    if VEC:
        head, body, at, end = ends(N, VEC)
        end_w = tl.load(w_ptr + at, end, 0.0).to(ACC)
        end_dw = tl.zeros([1, 2 * VEC], ACC)
        end_db = tl.zeros([1, 2 * VEC], ACC)
    n = tl.arange(0, BLOCK_N)[None, :]
    w = tl.load(w_ptr + head + n, n < body, 0.0).to(ACC)
    dw = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    db = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for i in tl.range(0, trips, num_stages=3):
        tile = int64(i) * tl.num_programs(0) + tl.program_id(0)
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        dy_row, x_row, row = m * dy_stride, m * x_stride, m * N
        if VEC:
            row = tl.multiple_of(tile * N + head, VEC)
            dy_row, x_row = row, row
        real = (m < M) & (n < body)
        mean = tl.load(mean_ptr + m, m < M, 0.0)
        rstd = tl.load(rstd_ptr + m, m < M, 0.0)
        dy, h, g = _gradient(dy_ptr, x_ptr, w, mean, rstd, dy_row, x_row, n, real, ACC)
        if VEC:
            first, last = m * N, end & (m < M)
            end_dy, end_h, end_g = _gradient(dy_ptr, x_ptr, end_w, mean, rstd, first, first, at, last, ACC)
            level = (tl.sum(g) + tl.sum(end_g)) / N
            along = (tl.sum(g * h) + tl.sum(end_g * end_h)) / N
        else:
            level = tl.sum(g, axis=1)[:, None] / N
            along = tl.sum(g * h, axis=1)[:, None] / N  # how much of g points along h
        tl.store(dx_ptr + row + n, rstd * (g - level - h * along), real)
        dw += dy * h
        db += dy
        if VEC:
            tl.store(dx_ptr + first + at, rstd * (end_g - level - end_h * along), last)
            end_dw += end_dy * end_h
            end_db += end_dy
    mine = int64(tl.program_id(0)) * N
    tl.store(dw_ptr + mine + head + n, tl.sum(dw, axis=0)[None, :], n < body)
    if db_ptr is not None:
        tl.store(db_ptr + mine + head + n, tl.sum(db, axis=0)[None, :], n < body)
    if VEC:
        tl.store(dw_ptr + mine + at, end_dw, end)
        if db_ptr is not None:
            tl.store(db_ptr + mine + at, end_db, end)


@triton.jit
def _levels(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, level_ptr, along_ptr, N, dy_stride, x_stride,
    BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m = int64(tl.program_id(0))
    n = tl.arange(0, BLOCK_N)
    mean = tl.load(mean_ptr + m)
    level = tl.zeros([BLOCK_N], ACC)
    along = tl.zeros([BLOCK_N], ACC)
    for start in range(0, N, BLOCK_N):
        at = start + n
        dy = tl.load(dy_ptr + m * dy_stride + at, at < N, 0.0).to(ACC)
        x = tl.load(x_ptr + m * x_stride + at, at < N, 0.0).to(ACC)
        g = dy * tl.load(w_ptr + at, at < N, 0.0).to(ACC)
        level += g
        along += g * (x - mean)
    tl.store(level_ptr + m, tl.sum(level, axis=0) / N)
    tl.store(along_ptr + m, tl.load(rstd_ptr + m) * tl.sum(along, axis=0) / N)


@triton.jit
def _columns(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, level_ptr, along_ptr, dx_ptr, dw_ptr, db_ptr,
    M, N, dy_stride, x_stride, ROWS, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = at[None, :]
    w = tl.load(w_ptr + n, n < N, 0.0).to(ACC)
    dw = tl.zeros([BLOCK_N], ACC)
    db = tl.zeros([BLOCK_N], ACC)
    first = tl.program_id(1) * ROWS
    for start in range(first, min(first + ROWS, M), BLOCK_M):
        m = int64(start) + tl.arange(0, BLOCK_M)[:, None]
        real = (m < M) & (n < N)
        mean = tl.load(mean_ptr + m, m < M, 0.0)
        rstd = tl.load(rstd_ptr + m, m < M, 0.0)
        level = tl.load(level_ptr + m, m < M, 0.0)
        along = tl.load(along_ptr + m, m < M, 0.0)
        dy, h, g = _gradient(dy_ptr, x_ptr, w, mean, rstd, m * dy_stride, m * x_stride, n, real, ACC)
        tl.store(dx_ptr + m * N + n, rstd * (g - level - h * along), real)
        dw += tl.sum(dy * h, axis=0)
        db += tl.sum(dy, axis=0)
    tl.store(dw_ptr + int64(tl.program_id(1)) * N + at, dw, at < N)
    if db_ptr is not None:
        tl.store(db_ptr + int64(tl.program_id(1)) * N + at, db, at < N)


def forward(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float,
    *, block_m: int | None = None, programs_per_sm: int | None = None, num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    rows, w, b = as_rows(x), w.contiguous(), None if b is None else b.contiguous()
    (M, N), acc, sms = rows.shape, triton_acc(x.dtype), num_sms(x.device)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean = torch.empty(x.shape[:-1], dtype=accumulator(x.dtype), device=x.device)
    rstd = torch.empty_like(mean)
    if not x.numel():
        return y, mean, rstd
    if N > WHOLE:
        _forward_wide[(M,)](rows, w, b, y, mean, rstd, N, rows.stride(0), eps, ACC=acc, VEC=vector(rows), **walk(rows))
        return y, mean, rstd
    vec = vector(rows) if next_power_of_2(N) >= 2048 and block_m in (None, 1) else 0
    vec = vec if body_block(N, vec) <= 8192 else 0
    block_n = body_block(N, vec)
    most = 1 if vec else max(1, min(2 if block_n == 8192 else 8192 // block_n, M // (4 * sms)))  # enough programs first
    block_m = block_m or 1 << most.bit_length() - 1
    tile, tiles = block_m * block_n, triton.cdiv(M, block_m)
    programs_per_sm = programs_per_sm or ((6 if tile <= 2048 else 4) if vec else None)
    programs = min(tiles, sms * programs_per_sm) if programs_per_sm else tiles
    programs = max(programs // vec, 1) * vec if vec and programs < tiles else programs
    _forward[(programs,)](
        rows, w, b, y, mean, rstd, M, N, rows.stride(0), eps, triton.cdiv(tiles, programs),
        BLOCK_M=block_m, BLOCK_N=block_n, ACC=acc, VEC=vec, EVEN=block_n == N,
        num_warps=num_warps or ((4 if tile == 8192 else 2) if vec else min(max(tile // 2048, 1), 16)),
    )  # fmt: skip
    return y, mean, rstd


def backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None,
    mean: torch.Tensor, rstd: torch.Tensor, eps: float,
    *, programs_per_sm: int | None = None, num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    dys, rows, w = as_rows(dy), as_rows(x), w.contiguous()
    (M, N), acc, sms = rows.shape, triton_acc(x.dtype), num_sms(x.device)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return dx, torch.zeros_like(w), None if b is None else torch.zeros_like(b)
    strides, block_m = (dys.stride(0), rows.stride(0)), max(1, 2048 // next_power_of_2(N))
    vec = vector(dys, rows) if block_m == 1 else 0
    block_n = body_block(N, vec)
    if block_n * max(x.element_size() // 4, 1) <= WHOLE_BACKWARD:
        tile, tiles = block_m * block_n, triton.cdiv(M, block_m)
        warps = num_warps or min(max(tile // (512 if block_m == 1 else 256), 1), 16)
        programs = min(tiles, sms * (programs_per_sm or 16 // warps))  # what fits at 128 registers a thread
        programs = max(programs // vec, 1) * vec if vec else programs
        partial = torch.empty(1 if b is None else 2, programs, N, dtype=rstd.dtype, device=x.device)
        dw, db = partial[0], None if b is None else partial[1]
        _backward[(programs,)](
            dys, rows, w, mean, rstd, dx, dw, db, M, N, *strides, triton.cdiv(tiles, programs),
            BLOCK_M=block_m, BLOCK_N=block_n, ACC=acc, VEC=vec, num_warps=warps, maxnreg=128,
            enable_fp_fusion=vec > 0,  # at N = 1 dx is zero; fused, dy * w - level would leave the rounding of level
        )  # fmt: skip
    else:
        level, along = torch.empty_like(rstd), torch.empty_like(rstd)
        _levels[(M,)](dys, rows, w, mean, rstd, level, along, N, *strides, BLOCK_N=4096, ACC=acc, num_warps=8)
        blocks, tiles = triton.cdiv(N, 1024), triton.cdiv(M, 4)
        splits = min(tiles, triton.cdiv(16 * sms, blocks))
        partial = torch.empty(1 if b is None else 2, splits, N, dtype=rstd.dtype, device=x.device)
        dw, db = partial[0], None if b is None else partial[1]
        _columns[(blocks, splits)](
            dys, rows, w, mean, rstd, level, along, dx, dw, db, M, N, *strides, 4 * triton.cdiv(tiles, splits),
            BLOCK_M=4, BLOCK_N=1024, ACC=acc, num_warps=4,
        )  # fmt: skip
    if b is None:
        return dx, column_sum(partial[0], w.dtype), None
    return dx, *column_sums(partial, w.dtype, b.dtype)
