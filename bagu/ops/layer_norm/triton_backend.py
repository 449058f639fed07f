"""LayerNorm on Triton: one program owns whole rows, so x crosses memory once each way; memory is the limit.

The mean is taken first and the squared deviations from it second, both from registers, so a large mean costs the
variance no digits. In the backward programs are few and have many rows each: w, dw and db stay in registers, and the
next rows are copied to shared memory two ahead (num_stages), which keeps bytes in flight while a row is being reduced.
Rows of an odd N are cut into an aligned body and its ends (VEC > 0) as RMSNorm's are.

Rows past WHOLE, in the backward past WHOLE_BACKWARD, are wide_kernels' business.

Backward, with h = (x - mean) * rstd and g = dy * w, and no atomics, so the same inputs give the same bits:

    dx = rstd * (g - mean_n(g) - h * mean_n(g * h))        dw = sum_m dy * h        db = sum_m dy
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.kernels import apart, column_sum, column_sums, int64, read_apart, reciprocal, rsqrt, take_apart
from bagu.ops.launch import alike, as_rows, blocks, next_power_of_2, num_sms, triton_acc, vector
from bagu.ops.layer_norm.wide_kernels import gradient, run_backward, run_forward
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
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    head, body = 0, N
    if TAIL:
        head, body, at, end = apart(int64(tl.program_id(0)), N, BLOCK_N, TAIL, VEC)
        end_w = tl.load(w_ptr + at, end, 0.0).to(ACC)
    next_x = 0
    if VEC:
        next_x = read_apart(x_ptr, int64(tl.program_id(0)), M, N, at, end)
    n = tl.arange(0, BLOCK_N)[None, :]
    inside = EVEN | (n < body)
    w = tl.load(w_ptr + head + n, inside, 0.0).to(ACC)
    if b_ptr is not None:
        b = tl.load(b_ptr + head + n, inside, 0.0).to(ACC)
        if TAIL:
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
        if TAIL:
            end_x, next_x = take_apart(x_ptr, next_x, tile, m, M, N, x_stride, at, end, VEC, ACC)
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
        if TAIL:
            end_y = end_x * rstd * end_w
            if b_ptr is not None:
                end_y += end_b
            tl.store(y_ptr + m * N + at, end_y, end & (m < M))


@triton.jit
def _backward(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, M, N, dy_stride, x_stride, trips,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head, body = 0, N
    if TAIL:
        head, body, at, end = apart(int64(tl.program_id(0)), N, BLOCK_N, TAIL, VEC)
        end_w = tl.load(w_ptr + at, end, 0.0).to(ACC)
        end_dw = tl.zeros([1, TAIL], ACC)
        end_db = tl.zeros([1, TAIL], ACC)
    next_dy, next_x = 0, 0
    if VEC:
        next_dy = read_apart(dy_ptr, int64(tl.program_id(0)), M, N, at, end)
        next_x = read_apart(x_ptr, int64(tl.program_id(0)), M, N, at, end)
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
        dy, h, g = gradient(dy_ptr, x_ptr, w, mean, rstd, dy_row, x_row, n, real, ACC)
        if TAIL:
            end_dy, next_dy = take_apart(dy_ptr, next_dy, tile, m, M, N, dy_stride, at, end, VEC, ACC)
            end_x, next_x = take_apart(x_ptr, next_x, tile, m, M, N, x_stride, at, end, VEC, ACC)
            end_h, end_g = (end_x - mean) * rstd, end_dy * end_w
            level = (tl.sum(g) + tl.sum(end_g)) / N
            along = (tl.sum(g * h) + tl.sum(end_g * end_h)) / N
        else:
            level = tl.sum(g, axis=1)[:, None] / N
            along = tl.sum(g * h, axis=1)[:, None] / N  # how much of g points along h
        tl.store(dx_ptr + row + n, rstd * (g - level - h * along), real)
        dw += dy * h
        db += dy
        if TAIL:
            tl.store(dx_ptr + m * N + at, rstd * (end_g - level - end_h * along), end & (m < M))
            end_dw += end_dy * end_h
            end_db += end_dy
    mine = int64(tl.program_id(0)) * N
    tl.store(dw_ptr + mine + head + n, tl.sum(dw, axis=0)[None, :], n < body)
    if db_ptr is not None:
        tl.store(db_ptr + mine + head + n, tl.sum(db, axis=0)[None, :], n < body)
    if TAIL:
        tl.store(dw_ptr + mine + at, end_dw, end)
        if db_ptr is not None:
            tl.store(db_ptr + mine + at, end_db, end)


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
        run_forward(rows, w, b, y, mean, rstd, eps, vector(rows))
        return y, mean, rstd
    alone = next_power_of_2(N) >= 2048 and block_m in (None, 1)  # else short rows share a program
    vec = vector(rows) if alone else 0
    block_n, tail = blocks(N, vec, 2) if alone else (next_power_of_2(N), 0)
    even = block_n == N
    plain = not alone or (even and N <= 8192)
    per_sm, warps = (None, 0) if plain else _crooked(block_n, tail, vec)
    most = min(2 if block_n == 8192 else 8192 // block_n, M // (4 * sms)) if plain else 1
    block_m = block_m or 1 << max(most, 1).bit_length() - 1
    tile, tiles = block_m * block_n, triton.cdiv(M, block_m)
    per_sm = programs_per_sm or per_sm
    programs = alike(sms * per_sm if per_sm else tiles, tiles, vec)
    _forward[(programs,)](
        rows, w, b, y, mean, rstd, M, N, rows.stride(0), eps, triton.cdiv(tiles, programs),
        BLOCK_M=block_m, BLOCK_N=block_n, TAIL=tail, VEC=vec, EVEN=even, ACC=acc,
        num_warps=num_warps or warps or min(max(tile // 2048, 1), 16),
    )  # fmt: skip
    return y, mean, rstd


def _crooked(block: int, tail: int, vec: int) -> tuple[int | None, int]:
    """Programs a multiprocessor (None: one a row) and the warps of each, for rows past 8,192 or of no power of two."""
    if block > 8192:
        return (2 if vec else 1), 8
    if vec:
        return (6, 2) if block <= 2048 else (3 if block == 4096 else 2, 4)
    if tail:
        return (None, min(block // 512, 4)) if block < 8192 else (4, 4) if tail < 4096 else (1, 8)
    return (8, 2) if block == 2048 else (4, 4)


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
    block_n, tail = blocks(N, vec) if block_m == 1 else (next_power_of_2(N), 0)
    if block_n * max(x.element_size() // 4, 1) <= WHOLE_BACKWARD:
        tile, tiles = block_m * block_n, triton.cdiv(M, block_m)
        warps = num_warps or min(max(tile // (512 if block_m == 1 else 256), 1), 16)
        programs = alike(sms * (programs_per_sm or 16 // warps), tiles, vec)  # what fits at 128 registers a thread
        partial = torch.empty(1 if b is None else 2, programs, N, dtype=rstd.dtype, device=x.device)
        dw, db = partial[0], None if b is None else partial[1]
        _backward[(programs,)](
            dys, rows, w, mean, rstd, dx, dw, db, M, N, *strides, triton.cdiv(tiles, programs),
            BLOCK_M=block_m, BLOCK_N=block_n, TAIL=tail, VEC=vec, ACC=acc, num_warps=warps, maxnreg=128,
            enable_fp_fusion=tail > 0,  # at N = 1 dx is zero; fused, dy * w - level would leave the rounding of level
        )  # fmt: skip
    else:
        partial = run_backward(dys, rows, w, b, mean, rstd, dx, vec)
    if b is None:
        return dx, column_sum(partial[0], w.dtype), None
    return dx, *column_sums(partial, w.dtype, b.dtype)
