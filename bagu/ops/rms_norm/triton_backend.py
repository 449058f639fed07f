"""RMSNorm on Triton: one program owns whole rows, so x crosses memory once each way; memory is the limit.

Forward keeps r, one fp32 per row. A row of at most WHOLE features stays in registers; wide_kernels has longer ones.
Backward rebuilds the rest from r, with g = dy * w:

    dx = r * (g - x * r^2 * mean_n(g * x))        dw = sum_m dy * x * r

dw is summed in registers over the rows a program owns, then over programs by `column_sum`: no atomics, so the same
inputs give the same bits. Few programs with many rows each have few bytes in flight while a row is being reduced, so
the next rows are copied to shared memory two ahead (num_stages).

Rows of an odd N start anywhere, but every VEC-th row starts alike. A program takes only such rows: then the same
features are the aligned body of each of them, read 128 bits at a time, and the same few are its ends (VEC > 0). Where N
is little past a power of two, what is past it is apart in the same way (see `blocks`).

`add_rms_norm` is the same kernels with an addend: x + addend is rounded, written as s and normalised; in the
backward ds is added to dx. RMSNorm has none, and its pointers are None.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.kernels import apart, column_sum, int64, read_apart, reciprocal, rsqrt, shifted, take_apart
from bagu.ops.launch import alike, as_rows, blocks, next_power_of_2, num_sms, triton_acc, vector
from bagu.ops.rms_norm.wide_kernels import add, run_backward, run_forward, write
from bagu.ops.signature import accumulator

WHOLE = 32768  # forward: the longest row kept in registers, 64 values a thread at 16 warps; at 65,536 ptxas spills
WHOLE_BACKWARD = 8192  # w, dw, x and dy are 16 values a thread each; at 16,384 ptxas spills
TUNABLE = {  # tests run each point
    "forward": {"block_m": (1, 2), "programs_per_sm": (None, 2), "num_warps": (4, 8)},
    "backward": {"programs_per_sm": (1, 2), "num_warps": (4, 8, 16)},
}


@triton.jit(do_not_specialize=["M"])
def _forward(
    x_ptr, addend_ptr, w_ptr, y_ptr, s_ptr, r_ptr, M, N, x_stride, addend_stride, w_step, eps, trips,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head, body = 0, N
    if TAIL:
        head, body, at, end = apart(int64(tl.program_id(0)), N, BLOCK_N, TAIL, VEC)
        end_w = tl.load(w_ptr + at, end, 0.0).to(ACC)
    if VEC:  # two bytes are too few to be copied ahead by themselves: see `read_apart`
        first = int64(tl.program_id(0)) * N
        next_x = add(x_ptr, addend_ptr, first, first, at, end, ACC)
    n = tl.arange(0, BLOCK_N)[None, :]
    w = tl.load(w_ptr + head * w_step + n, n < body, 0.0).to(ACC)
    share = reciprocal(N, ACC)
    for i in tl.range(0, trips, num_stages=3):
        tile = int64(i) * tl.num_programs(0) + tl.program_id(0)
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        x_row, addend_row, row = m * x_stride, m * addend_stride, m * N
        if TAIL:
            last = end & (m < M)
        if VEC:  # contiguous, one row at a time
            ends, ahead = next_x, tile + tl.num_programs(0)
            next_x = add(x_ptr, addend_ptr, ahead * N, ahead * N, at, end & (ahead < M), ACC)
            row = tl.multiple_of(tile * N + head, VEC)
            x_row, addend_row = row, row
        elif TAIL:
            ends = add(x_ptr, addend_ptr, x_row, addend_row, at, last, ACC)
        real = (m < M) & (n < body)
        s = add(x_ptr, addend_ptr, x_row, addend_row, n, real, ACC)
        if addend_ptr is not None:
            tl.store(s_ptr + row + n, s, real)
            if TAIL:
                tl.store(s_ptr + m * N + at, ends, last)
        x = s.to(ACC)
        if TAIL:
            end_x = ends.to(ACC)
            squares = tl.sum(x * x) + tl.sum(end_x * end_x)
        else:
            squares = tl.sum(x * x, axis=1)[:, None]
        r = rsqrt(squares * share + eps)
        tl.store(r_ptr + m, tl.zeros([BLOCK_M, 1], ACC) + r, m < M)
        tl.store(y_ptr + row + n, x * r * w, real)
        if TAIL:
            tl.store(y_ptr + m * N + at, end_x * r * end_w, last)


@triton.jit(do_not_specialize=["M"])
def _backward(
    dy_ptr, ds_ptr, x_ptr, w_ptr, r_ptr, dx_ptr, dw_ptr, M, N, dy_stride, ds_stride, x_stride, trips,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head, body = 0, N
    if TAIL:
        head, body, at, end = apart(int64(tl.program_id(0)), N, BLOCK_N, TAIL, VEC)
        end_w = tl.load(w_ptr + at, end, 0.0).to(ACC)
        end_dw = tl.zeros([1, TAIL], ACC)
    next_dy, next_x = 0, 0
    if VEC:
        next_dy = read_apart(dy_ptr, int64(tl.program_id(0)), M, N, at, end)
        next_x = read_apart(x_ptr, int64(tl.program_id(0)), M, N, at, end)
    n = tl.arange(0, BLOCK_N)[None, :]
    w = tl.load(w_ptr + head + n, n < body, 0.0).to(ACC)
    dw = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for i in tl.range(0, trips, num_stages=3):
        tile = int64(i) * tl.num_programs(0) + tl.program_id(0)
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        dy_row, ds_row, x_row, row = m * dy_stride, m * ds_stride, m * x_stride, m * N
        if VEC:
            row = tl.multiple_of(tile * N + head, VEC)
            dy_row, ds_row, x_row = row, row, row
        real = (m < M) & (n < body)
        r = tl.load(r_ptr + m, m < M, 0.0)
        dy = tl.load(dy_ptr + dy_row + n, real, 0.0, eviction_policy="evict_last").to(ACC)
        x = tl.load(x_ptr + x_row + n, real, 0.0, eviction_policy="evict_last").to(ACC)
        g = dy * w
        if TAIL:
            end_dy, next_dy = take_apart(dy_ptr, next_dy, tile, m, M, N, dy_stride, at, end, VEC, ACC)
            end_x, next_x = take_apart(x_ptr, next_x, tile, m, M, N, x_stride, at, end, VEC, ACC)
            end_g = end_dy * end_w
            along = tl.sum(g * x) + tl.sum(end_g * end_x)
        else:
            along = tl.sum(g * x, axis=1)[:, None]
        pull = r * r * along / N  # how much of g points along x
        write(dx_ptr, ds_ptr, r * (g - x * pull), row, ds_row, n, real)
        dw += dy * x * r
        if TAIL:
            write(dx_ptr, ds_ptr, r * (end_g - end_x * pull), m * N, m * ds_stride, at, end & (m < M))
            end_dw += end_dy * end_x * r
    mine = dw_ptr + int64(tl.program_id(0)) * N
    tl.store(mine + head + n, tl.sum(dw, axis=0)[None, :], n < body)
    if TAIL:
        tl.store(mine + at, end_dw, end)


def forward(
    x: torch.Tensor, w: torch.Tensor, eps: float,
    *, block_m: int | None = None, programs_per_sm: int | None = None, num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    y, _, r = add_forward(x, None, w, eps, block_m=block_m, programs_per_sm=programs_per_sm, num_warps=num_warps)
    return y, r


def add_forward(
    x: torch.Tensor, addend: torch.Tensor | None, w: torch.Tensor, eps: float,
    *, block_m: int | None, programs_per_sm: int | None, num_warps: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """y and r of s = x + addend, and s itself where there is an addend."""
    rows, w, more = as_rows(x), w.contiguous(), None if addend is None else as_rows(addend)
    (M, N), acc, sms = rows.shape, triton_acc(x.dtype), num_sms(x.device)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    s = None if addend is None else torch.empty_like(y)
    r = torch.empty(x.shape[:-1], dtype=accumulator(x.dtype), device=x.device)
    if not x.numel():
        return y, s, r
    vec = vector(rows) if more is None else vector(rows, more)
    strides = rows.stride(0), 0 if more is None else more.stride(0)
    if N > WHOLE:
        run_forward(rows, more, w, y, s, r, eps, vec)
        return y, s, r
    block_m = block_m or max(1, 2048 // next_power_of_2(N))
    vec = vec if block_m == 1 else 0
    block_n, tail = blocks(N, vec) if block_m == 1 else (next_power_of_2(N), 0)
    tile, tiles = block_m * block_n, triton.cdiv(M, block_m)
    programs = alike(sms * programs_per_sm if programs_per_sm else tiles, tiles, vec)
    each = 512 if block_m > 1 or block_n == N else 1024
    gains, _, step = shifted(w, None, vec, M)
    _forward[(programs,)](
        rows, more, gains, y, s, r, M, N, *strides, step, eps, triton.cdiv(tiles, programs),
        BLOCK_M=block_m, BLOCK_N=block_n, TAIL=tail, VEC=vec, ACC=acc,
        num_warps=num_warps or (16 if tile > 16384 else min(max(tile // each, 1), 8)),
    )  # fmt: skip
    return y, s, r


def backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, eps: float,
    *, programs_per_sm: int | None = None, num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return add_backward(dy, None, x, w, r, programs_per_sm=programs_per_sm, num_warps=num_warps)


def add_backward(
    dy: torch.Tensor, ds: torch.Tensor | None, x: torch.Tensor, w: torch.Tensor, r: torch.Tensor,
    *, programs_per_sm: int | None, num_warps: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """dx of the norm plus ds, and dw."""
    dys, rows, w, more = as_rows(dy), as_rows(x), w.contiguous(), None if ds is None else as_rows(ds)
    (M, N), acc, sms = rows.shape, triton_acc(x.dtype), num_sms(x.device)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return dx, torch.zeros_like(w)
    strides = dys.stride(0), 0 if more is None else more.stride(0), rows.stride(0)
    block_m = max(1, 2048 // next_power_of_2(N))
    vec = vector(dys, rows) if more is None else vector(dys, rows, more)
    vec = vec if block_m == 1 else 0
    block_n, tail = blocks(N, vec) if block_m == 1 else (next_power_of_2(N), 0)
    if block_n * max(x.element_size() // 4, 1) <= WHOLE_BACKWARD:
        tile, tiles = block_m * block_n, triton.cdiv(M, block_m)
        warps = num_warps or min(max(tile // (512 if block_m == 1 else 256), 1), 16)
        programs = alike(sms * (programs_per_sm or 16 // warps), tiles, vec)  # what fits at 128 registers a thread
        partial = torch.empty(programs, N, dtype=r.dtype, device=x.device)
        _backward[(programs,)](
            dys, more, rows, w, r, dx, partial, M, N, *strides, triton.cdiv(tiles, programs),
            BLOCK_M=block_m, BLOCK_N=block_n, TAIL=tail, VEC=vec, ACC=acc, num_warps=warps, maxnreg=128,
        )  # fmt: skip
        return dx, column_sum(partial, w.dtype)
    return dx, run_backward(dys, more, rows, w, r, dx, vec)
