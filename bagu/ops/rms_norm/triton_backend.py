"""RMSNorm on Triton: one program owns whole rows, so x crosses memory once each way; memory is the limit.

Forward keeps r, one fp32 per row. A row of at most WHOLE features stays in registers; a longer one is walked twice.
Backward rebuilds the rest from r, with g = dy * w:

    dx = r * (g - x * r^2 * mean_n(g * x))        dw = sum_m dy * x * r

dw is summed in registers over the rows a program owns, then over programs by `column_sum`: no atomics, so the same
inputs give the same bits. Few programs with many rows each have few bytes in flight while a row is being reduced, so
the next rows are copied to shared memory two ahead (num_stages). Rows too long for that cost x and dy twice: `_pulls`
finds each row's mean, then `_columns` owns some features of all rows.

Rows of an odd N start anywhere, but every VEC-th row starts alike. A program takes only such rows: then the same
features are the aligned body of each of them, read 128 bits at a time, and the same few are its ends (VEC > 0).

`add_rms_norm` is the same kernels with an addend: x + addend is rounded, written as s and normalised; in the
backward ds is added to dx. RMSNorm has none, and its pointers are None.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.kernels import column_sum, int64, reciprocal, rsqrt, split_row
from bagu.ops.launch import as_rows, next_power_of_2, num_sms, triton_acc
from bagu.ops.signature import accumulator

WHOLE = 32768  # forward: the longest row kept in registers, 64 values a thread at 16 warps; at 65,536 ptxas spills
WHOLE_BACKWARD = 8192  # w, dw, x and dy are 16 values a thread each; at 16,384 ptxas spills
TUNABLE = {  # tests run each point
    "forward": {"block_m": (1, 2), "programs_per_sm": (None, 2), "num_warps": (4, 8)},
    "backward": {"programs_per_sm": (1, 2), "num_warps": (4, 8, 16)},
}


@triton.jit
def ends(N, VEC: tl.constexpr):
    """Which features of this program's rows are aligned and which are not.

    Returns (head, body, at, end): the body is [head, head + body); the others are `at` where `end`.
    """
    _, body, head = split_row(int64(tl.program_id(0)) * N, N, VEC)
    e = tl.arange(0, 2 * VEC)[None, :]
    before = e < VEC
    at = tl.where(before, e, head + body + e - VEC)
    return head, body, at, tl.where(before, e < head, at < N)


@triton.jit
def _sum(x_ptr, addend_ptr, s_ptr, x_row, addend_row, s_row, n, real, ACC: tl.constexpr):
    """x, or x + addend as s holds it, which is then written."""
    x = tl.load(x_ptr + x_row + n, real, 0.0, eviction_policy="evict_last")
    if addend_ptr is not None:
        addend = tl.load(addend_ptr + addend_row + n, real, 0.0, eviction_policy="evict_last")
        x = (x.to(ACC) + addend.to(ACC)).to(x.dtype)
        tl.store(s_ptr + s_row + n, x, real)
    return x.to(ACC)


@triton.jit(do_not_specialize=["M"])
def _forward(
    x_ptr, addend_ptr, w_ptr, y_ptr, s_ptr, r_ptr, M, N, x_stride, addend_stride, eps, trips,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    head, body = 0, N
    if VEC:
        head, body, at, end = ends(N, VEC)
        end_w = tl.load(w_ptr + at, end, 0.0).to(ACC)
    n = tl.arange(0, BLOCK_N)[None, :]
    w = tl.load(w_ptr + head + n, n < body, 0.0).to(ACC)
    share = reciprocal(N, ACC)
    for i in tl.range(0, trips, num_stages=3):
        tile = int64(i) * tl.num_programs(0) + tl.program_id(0)
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        x_row, addend_row, row = m * x_stride, m * addend_stride, m * N
        if VEC:  # contiguous, one row at a time
            row = tl.multiple_of(tile * N + head, VEC)
            x_row, addend_row = row, row
        real = (m < M) & (n < body)
        x = _sum(x_ptr, addend_ptr, s_ptr, x_row, addend_row, row, n, real, ACC)
        if VEC:
            first = m * N
            end_x = _sum(x_ptr, addend_ptr, s_ptr, first, first, first, at, end & (m < M), ACC)
            squares = tl.sum(x * x) + tl.sum(end_x * end_x)
        else:
            squares = tl.sum(x * x, axis=1)[:, None]
        r = rsqrt(squares * share + eps)
        tl.store(r_ptr + m, tl.zeros([BLOCK_M, 1], ACC) + r, m < M)
        tl.store(y_ptr + row + n, x * r * w, real)
        if VEC:
            tl.store(y_ptr + first + at, end_x * r * end_w, end & (m < M))


@triton.jit
def _forward_wide(
    x_ptr, addend_ptr, w_ptr, y_ptr, s_ptr, r_ptr, N, x_stride, addend_stride, eps,
    BLOCK_N: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    m = int64(tl.program_id(0))
    first, head, body = m * N, 0, N
    x_row, addend_row, row = m * x_stride, m * addend_stride, first
    if VEC:
        head, body, at, end = ends(N, VEC)
        row = tl.multiple_of(first + head, VEC)
        x_row, addend_row = row, row
        end_x = _sum(x_ptr, addend_ptr, s_ptr, first, first, first, at, end, ACC)
    n = tl.arange(0, BLOCK_N)[None, :]
    squares = tl.zeros([1, BLOCK_N], ACC)
    for start in tl.range(0, body, BLOCK_N, num_stages=4):
        i = start + n
        x = _sum(x_ptr, addend_ptr, s_ptr, x_row, addend_row, row, i, i < body, ACC)
        squares += x * x
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
        w = tl.load(w_ptr + head + i, i < body, 0.0).to(ACC)
        tl.store(y_ptr + row + i, x * r * w, i < body)
    if VEC:
        tl.store(y_ptr + first + at, end_x * r * tl.load(w_ptr + at, end, 0.0).to(ACC), end)


@triton.jit
def _gradient(dy_ptr, x_ptr, w, dy_row, x_row, n, real, ACC: tl.constexpr):
    """dy, x and g = dy * w."""
    dy = tl.load(dy_ptr + dy_row + n, real, 0.0, eviction_policy="evict_last").to(ACC)
    x = tl.load(x_ptr + x_row + n, real, 0.0, eviction_policy="evict_last").to(ACC)
    return dy, x, dy * w


@triton.jit
def _write(dx_ptr, ds_ptr, dx, row, ds_row, n, real):
    """dx, with ds where there is one."""
    if ds_ptr is not None:
        dx += tl.load(ds_ptr + ds_row + n, real, 0.0).to(dx.dtype)
    tl.store(dx_ptr + row + n, dx, real)


@triton.jit(do_not_specialize=["M"])
def _backward(
    dy_ptr, ds_ptr, x_ptr, w_ptr, r_ptr, dx_ptr, dw_ptr, M, N, dy_stride, ds_stride, x_stride, trips,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    head, body = 0, N
    if VEC:
        head, body, at, end = ends(N, VEC)
        end_w = tl.load(w_ptr + at, end, 0.0).to(ACC)
        end_dw = tl.zeros([1, 2 * VEC], ACC)
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
        dy, x, g = _gradient(dy_ptr, x_ptr, w, dy_row, x_row, n, real, ACC)
        if VEC:
            first = m * N
            last = end & (m < M)
            end_dy, end_x, end_g = _gradient(dy_ptr, x_ptr, end_w, first, first, at, last, ACC)
            along = tl.sum(g * x) + tl.sum(end_g * end_x)
        else:
            along = tl.sum(g * x, axis=1)[:, None]
        pull = r * r * along / N  # how much of g points along x
        _write(dx_ptr, ds_ptr, r * (g - x * pull), row, ds_row, n, real)
        dw += dy * x * r
        if VEC:
            _write(dx_ptr, ds_ptr, r * (end_g - end_x * pull), first, first, at, last)
            end_dw += end_dy * end_x * r
    mine = dw_ptr + int64(tl.program_id(0)) * N
    tl.store(mine + head + n, tl.sum(dw, axis=0)[None, :], n < body)
    if VEC:
        tl.store(mine + at, end_dw, end)


@triton.jit
def _pulls(dy_ptr, x_ptr, w_ptr, r_ptr, pull_ptr, N, dy_stride, x_stride, BLOCK_N: tl.constexpr, ACC: tl.constexpr):
    m = int64(tl.program_id(0))
    n = tl.arange(0, BLOCK_N)
    along = tl.zeros([BLOCK_N], ACC)
    for start in range(0, N, BLOCK_N):
        at = start + n
        dy = tl.load(dy_ptr + m * dy_stride + at, at < N, 0.0).to(ACC)
        x = tl.load(x_ptr + m * x_stride + at, at < N, 0.0).to(ACC)
        along += dy * tl.load(w_ptr + at, at < N, 0.0).to(ACC) * x
    r = tl.load(r_ptr + m)
    tl.store(pull_ptr + m, r * r * tl.sum(along, axis=0) / N)


@triton.jit
def _columns(
    dy_ptr, ds_ptr, x_ptr, w_ptr, r_ptr, pull_ptr, dx_ptr, dw_ptr, M, N, dy_stride, ds_stride, x_stride, ROWS,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = at[None, :]
    w = tl.load(w_ptr + n, n < N, 0.0).to(ACC)
    dw = tl.zeros([BLOCK_N], ACC)
    first = tl.program_id(1) * ROWS
    for start in range(first, min(first + ROWS, M), BLOCK_M):
        m = int64(start) + tl.arange(0, BLOCK_M)[:, None]
        real = (m < M) & (n < N)
        dy = tl.load(dy_ptr + m * dy_stride + n, real, 0.0).to(ACC)
        x = tl.load(x_ptr + m * x_stride + n, real, 0.0).to(ACC)
        r = tl.load(r_ptr + m, m < M, 0.0)
        pull = tl.load(pull_ptr + m, m < M, 0.0)
        _write(dx_ptr, ds_ptr, r * (dy * w - x * pull), m * N, m * ds_stride, n, real)
        dw += tl.sum(dy * x * r, axis=0)
    tl.store(dw_ptr + int64(tl.program_id(1)) * N + at, dw, at < N)


def vector(*rows: torch.Tensor) -> int:
    """How many elements 16 bytes hold, where rows lie without gaps and start anywhere in them; else 0, and no ends."""
    wide = 16 // rows[0].element_size()
    return wide if rows[0].shape[1] % wide and all(r.is_contiguous() for r in rows) else 0


def body_block(N: int, vec: int) -> int:
    """The block that holds a row, or, where its ends are apart, the longest body: 4,096 of 4,097, not 8,192."""
    return next_power_of_2(max(N // vec, 1) * vec if vec else N)


def walk(rows: torch.Tensor) -> dict[str, int]:
    """The options of a kernel that walks a row twice: small programs, one a row.

    On an H200 they reach 0.61 of copy bandwidth at 1024 x 131,072; one program of 16 warps a multiprocessor, whose rows
    the L2 holds for the second walk, reaches 0.47.
    """
    return {"BLOCK_N": 2048 // max(rows.element_size() // 4, 1), "num_warps": 4}


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
        _forward_wide[(M,)](rows, more, w, y, s, r, N, *strides, eps, ACC=acc, VEC=vec, **walk(rows))
        return y, s, r
    block_m = block_m or max(1, 2048 // next_power_of_2(N))
    vec = vec if block_m == 1 and body_block(N, vec) <= 8192 else 0
    block_n = body_block(N, vec)
    tile, tiles = block_m * block_n, triton.cdiv(M, block_m)
    programs = min(tiles, sms * programs_per_sm) if programs_per_sm else tiles
    programs = max(programs // vec, 1) * vec if vec and programs < tiles else programs
    _forward[(programs,)](
        rows, more, w, y, s, r, M, N, *strides, eps, triton.cdiv(tiles, programs),
        BLOCK_M=block_m, BLOCK_N=block_n, ACC=acc, VEC=vec,
        num_warps=num_warps or min(max(tile // (1024 if vec else 512), 1), 8),
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
    block_n = body_block(N, vec)
    if block_n * max(x.element_size() // 4, 1) <= WHOLE_BACKWARD:
        tile, tiles = block_m * block_n, triton.cdiv(M, block_m)
        warps = num_warps or min(max(tile // (512 if block_m == 1 else 256), 1), 16)
        programs = min(tiles, sms * (programs_per_sm or 16 // warps))  # what fits at 128 registers a thread
        programs = max(programs // vec, 1) * vec if vec else programs
        partial = torch.empty(programs, N, dtype=r.dtype, device=x.device)
        _backward[(programs,)](
            dys, more, rows, w, r, dx, partial, M, N, *strides, triton.cdiv(tiles, programs),
            BLOCK_M=block_m, BLOCK_N=block_n, ACC=acc, VEC=vec, num_warps=warps, maxnreg=128,
        )  # fmt: skip
        return dx, column_sum(partial, w.dtype)
    pull = torch.empty_like(r)
    _pulls[(M,)](dys, rows, w, r, pull, N, dys.stride(0), rows.stride(0), BLOCK_N=4096, ACC=acc, num_warps=8)
    blocks, tiles = triton.cdiv(N, 1024), triton.cdiv(M, 4)
    splits = min(tiles, triton.cdiv(16 * sms, blocks))
    partial = torch.empty(splits, N, dtype=r.dtype, device=x.device)
    _columns[(blocks, splits)](
        dys, more, rows, w, r, pull, dx, partial, M, N, *strides, 4 * triton.cdiv(tiles, splits),
        BLOCK_M=4, BLOCK_N=1024, ACC=acc, num_warps=4,
    )  # fmt: skip
    return dx, column_sum(partial, w.dtype)
