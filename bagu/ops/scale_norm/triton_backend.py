"""ScaleNorm on Triton: one program owns whole rows, so x crosses memory once each way; memory is the limit.

Forward keeps norm, one fp32 per row. Backward, with r = 1 / max(norm, eps):

    dx = g * r * (dy - x * r^2 * sum_n(dy * x))        dg = sum_m r * sum_n(dy * x)

where the second term of dx is absent if norm < eps. dg is summed over the rows a program owns, then over programs by
`column_sum`, without atomics; so programs are few, and copy their next rows to shared memory two ahead. Rows that do
not fit a program are walked twice, and the second walk finds them in the L2 (in the backward not past about 65,536:
x and dy of 132 such rows are 34 MB). Rows of an odd N are cut into an aligned body and its ends as RMSNorm's are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.kernels import apart, column_sum, int64, read_apart, take_apart
from bagu.ops.launch import alike, as_rows, blocks, next_power_of_2, num_sms, triton_acc, vector, walk
from bagu.ops.signature import accumulator

WHOLE = 32768  # forward: the longest row kept in registers, 64 values a thread at 16 warps
WHOLE_BACKWARD = 32768  # bytes: two rows each of x and dy wait in shared memory
TUNABLE = {  # tests run each point
    "forward": {"block_m": (1, 2, 8), "num_warps": (4, 8)},
    "backward": {"programs_per_sm": (1, 2), "num_warps": (4, 8)},
}


@triton.jit
def _forward(
    x_ptr, g_ptr, y_ptr, norm_ptr, M, N, x_stride, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m = int64(tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    x_row, row, body = m * x_stride, m * N, N
    if TAIL:  # one row at a time
        head, body, at, end = apart(int64(tl.program_id(0)), N, BLOCK_N, TAIL, VEC)
        end_x = read_apart(x_ptr, m, M, x_stride, at, end).to(ACC)
    if VEC:  # contiguous
        row = tl.multiple_of(int64(tl.program_id(0)) * N + head, VEC)
        x_row = row
    real = (m < M) & (n < body)
    x = tl.load(x_ptr + x_row + n, real, 0.0).to(ACC)
    if TAIL:
        norm = tl.sqrt(tl.sum(x * x) + tl.sum(end_x * end_x))
    else:
        norm = tl.sqrt(tl.sum(x * x, axis=1)[:, None])
    scale = tl.load(g_ptr).to(ACC) / tl.where(norm < eps, eps, norm)  # a NaN stays, as in no maximum of Triton's
    tl.store(norm_ptr + m, tl.zeros([BLOCK_M, 1], ACC) + norm, m < M)
    tl.store(y_ptr + row + n, x * scale, real)
    if TAIL:
        tl.store(y_ptr + m * N + at, end_x * scale, end)


@triton.jit
def _forward_wide(
    x_ptr, g_ptr, y_ptr, norm_ptr, M, N, x_stride, eps,
    BLOCK_N: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m = int64(tl.program_id(0))
    x_row, row, body = m * x_stride, m * N, N
    if VEC:
        head, body, at, end = apart(m, N, BLOCK_N, 2 * VEC, VEC)
        end_x = read_apart(x_ptr, m, M, N, at, end).to(ACC)
        row = tl.multiple_of(m * N + head, VEC)
        x_row = row
    n = tl.arange(0, BLOCK_N)
    squares = tl.zeros([BLOCK_N], ACC)
    for start in tl.range(0, body, BLOCK_N, num_stages=4):
        i = start + n
        x = tl.load(x_ptr + x_row + i, i < body, 0.0, eviction_policy="evict_last").to(ACC)
        squares += x * x
    total = tl.sum(squares)
    if VEC:
        total += tl.sum(end_x * end_x)
    norm = tl.sqrt(total)
    tl.store(norm_ptr + m, norm)
    scale = tl.load(g_ptr).to(ACC) / tl.where(norm < eps, eps, norm)
    for start in tl.range(0, body, BLOCK_N, num_stages=2):
        i = start + n
        x = tl.load(x_ptr + x_row + i, i < body, 0.0, eviction_policy="evict_first").to(ACC)
        tl.store(y_ptr + row + i, x * scale, i < body)
    if VEC:
        tl.store(y_ptr + m * N + at, end_x * scale, end)


@triton.jit
def _backward(
    dy_ptr, x_ptr, g_ptr, norm_ptr, dx_ptr, dg_ptr, M, N, dy_stride, x_stride, eps, trips,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head, body = 0, N
    if TAIL:
        head, body, at, end = apart(int64(tl.program_id(0)), N, BLOCK_N, TAIL, VEC)
    next_dy, next_x = 0, 0
    if VEC:
        next_dy = read_apart(dy_ptr, int64(tl.program_id(0)), M, N, at, end)
        next_x = read_apart(x_ptr, int64(tl.program_id(0)), M, N, at, end)
    n = tl.arange(0, BLOCK_N)[None, :]
    g = tl.load(g_ptr).to(ACC)
    dg = tl.zeros([BLOCK_M, 1], ACC)
    for i in tl.range(0, trips, num_stages=3):
        tile = int64(i) * tl.num_programs(0) + tl.program_id(0)
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        dy_row, x_row, row = m * dy_stride, m * x_stride, m * N
        if VEC:
            row = tl.multiple_of(tile * N + head, VEC)
            dy_row, x_row = row, row
        real = (m < M) & (n < body)
        dy = tl.load(dy_ptr + dy_row + n, real, 0.0).to(ACC)
        x = tl.load(x_ptr + x_row + n, real, 0.0).to(ACC)
        norm = tl.load(norm_ptr + m, m < M, 1.0)
        r = 1.0 / tl.where(norm < eps, eps, norm)
        if TAIL:
            end_dy, next_dy = take_apart(dy_ptr, next_dy, tile, m, M, N, dy_stride, at, end, VEC, ACC)
            end_x, next_x = take_apart(x_ptr, next_x, tile, m, M, N, x_stride, at, end, VEC, ACC)
            along = tl.sum(dy * x) + tl.sum(end_dy * end_x)
        else:
            along = tl.sum(dy * x, axis=1)[:, None]
        pull = tl.where(norm < eps, 0.0, along * r * r)
        tl.store(dx_ptr + row + n, g * r * (dy - x * pull), real)
        if TAIL:
            tl.store(dx_ptr + m * N + at, g * r * (end_dy - end_x * pull), end & (m < M))
        dg += along * r
    tl.store(dg_ptr + tl.program_id(0), tl.sum(dg))


@triton.jit
def _backward_wide(
    dy_ptr, x_ptr, g_ptr, norm_ptr, dx_ptr, dg_ptr, M, N, dy_stride, x_stride, eps,
    BLOCK_N: tl.constexpr, VEC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m = int64(tl.program_id(0))
    dy_row, x_row, row, body = m * dy_stride, m * x_stride, m * N, N
    if VEC:
        head, body, at, end = apart(m, N, BLOCK_N, 2 * VEC, VEC)
        end_dy, end_x = read_apart(dy_ptr, m, M, N, at, end).to(ACC), read_apart(x_ptr, m, M, N, at, end).to(ACC)
        row = tl.multiple_of(m * N + head, VEC)
        dy_row, x_row = row, row
    n = tl.arange(0, BLOCK_N)
    products = tl.zeros([BLOCK_N], ACC)
    for start in tl.range(0, body, BLOCK_N, num_stages=4):
        i = start + n
        dy = tl.load(dy_ptr + dy_row + i, i < body, 0.0, eviction_policy="evict_last").to(ACC)
        x = tl.load(x_ptr + x_row + i, i < body, 0.0, eviction_policy="evict_last").to(ACC)
        products += dy * x
    along = tl.sum(products)
    if VEC:
        along += tl.sum(end_dy * end_x)
    norm = tl.load(norm_ptr + m)
    r = 1.0 / tl.where(norm < eps, eps, norm)
    pull = tl.where(norm < eps, 0.0, along * r * r)
    g = tl.load(g_ptr).to(ACC)
    for start in tl.range(0, body, BLOCK_N, num_stages=2):
        i = start + n
        dy = tl.load(dy_ptr + dy_row + i, i < body, 0.0, eviction_policy="evict_first").to(ACC)
        x = tl.load(x_ptr + x_row + i, i < body, 0.0, eviction_policy="evict_first").to(ACC)
        tl.store(dx_ptr + row + i, g * r * (dy - x * pull), i < body)
    if VEC:
        tl.store(dx_ptr + m * N + at, g * r * (end_dy - end_x * pull), end)
    tl.store(dg_ptr + m, along * r)


def forward(
    x: torch.Tensor, g: torch.Tensor, eps: float, *, block_m: int | None = None, num_warps: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = as_rows(x)
    (M, N), acc = rows.shape, triton_acc(x.dtype)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    norm = torch.empty(x.shape[:-1], dtype=accumulator(x.dtype), device=x.device)
    if not x.numel():
        return y, norm
    if N > WHOLE:
        _forward_wide[(M,)](rows, g, y, norm, M, N, rows.stride(0), eps, VEC=vector(rows), ACC=acc, **walk(rows))
        return y, norm
    block_m = block_m or max(1, 2048 // next_power_of_2(N))
    vec = vector(rows) if block_m == 1 else 0
    block_n, tail = blocks(N, vec) if block_m == 1 else (next_power_of_2(N), 0)
    tile = block_m * block_n
    _forward[(triton.cdiv(M, block_m),)](
        rows, g, y, norm, M, N, rows.stride(0), eps,
        BLOCK_M=block_m, BLOCK_N=block_n, TAIL=tail, VEC=vec, ACC=acc,
        num_warps=num_warps or min(max(tile // 512, 1), 16),
    )  # fmt: skip
    return y, norm


def backward(
    dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor, norm: torch.Tensor, eps: float,
    *, programs_per_sm: int | None = None, num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    dys, rows = as_rows(dy), as_rows(x)
    (M, N), acc = rows.shape, triton_acc(x.dtype)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return dx, torch.zeros_like(g)
    strides, block_m = (dys.stride(0), rows.stride(0)), max(1, 2048 // next_power_of_2(N))
    vec = vector(dys, rows) if block_m == 1 else 0
    block_n, tail = blocks(N, vec) if block_m == 1 else (next_power_of_2(N), 0)
    if block_n * x.element_size() > WHOLE_BACKWARD:
        partial = torch.empty(M, 1, dtype=norm.dtype, device=x.device)
        _backward_wide[(M,)](dys, rows, g, norm, dx, partial, M, N, *strides, eps, VEC=vec, ACC=acc, **walk(rows))
        return dx, column_sum(partial, g.dtype)
    tile, tiles = block_m * block_n, triton.cdiv(M, block_m)
    warps = num_warps or min(max(tile // 512, 1), 16)
    programs = alike(num_sms(x.device) * (programs_per_sm or 16 // warps), tiles, vec)
    partial = torch.empty(programs, 1, dtype=norm.dtype, device=x.device)
    _backward[(programs,)](
        dys, rows, g, norm, dx, partial, M, N, *strides, eps, triton.cdiv(tiles, programs),
        BLOCK_M=block_m, BLOCK_N=block_n, TAIL=tail, VEC=vec, ACC=acc, num_warps=warps, maxnreg=128,
    )  # fmt: skip
    return dx, column_sum(partial, g.dtype)
