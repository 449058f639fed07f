"""RMSNorm on Triton: one program owns whole rows, so x crosses memory once each way.

A row of at most BLOCK_N features stays in registers. A longer one is walked twice, and the second walk finds it in
the L2: that is why the wide grid has one program per multiprocessor (132 rows of 131,072 bf16 are 34 MB of an
H200's 60). Forward keeps r, one fp32 per row. Backward rebuilds the rest from it, with g = dy * w:

    dx = r * (g - x * r^2 * mean_n(g * x))        dw = sum_m dy * x * r

dw is summed in registers over the rows a program owns, then over programs by `column_sum`: no atomics, so the same
inputs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.kernels import column_sum, int64
from bagu.ops.launch import as_rows, next_power_of_2, num_sms, triton_acc

WHOLE = 32768  # the longest row kept in registers: 32 values a thread at 32 warps; at 65,536 ptxas spills
TUNABLE = {  # tests run each point
    "forward": {"block_m": (1, 2, 8), "num_warps": (4, 8)},
    "backward": {"programs_per_sm": (1, 2), "num_warps": (4, 8)},
}


@triton.jit
def _forward(
    x_ptr, w_ptr, y_ptr, r_ptr, M, N, x_stride, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    real = (m < M)[:, None] & (n < N)[None, :]
    x = tl.load(x_ptr + m[:, None] * x_stride + n[None, :], real, 0.0).to(ACC)
    w = tl.load(w_ptr + n, n < N, 0.0).to(ACC)
    r = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / N + eps)
    tl.store(r_ptr + m, r, m < M)
    tl.store(y_ptr + m[:, None] * N + n[None, :], x * r[:, None] * w[None, :], real)


@triton.jit
def _forward_wide(x_ptr, w_ptr, y_ptr, r_ptr, M, N, x_stride, eps, BLOCK_N: tl.constexpr, ACC: tl.constexpr):
    n = tl.arange(0, BLOCK_N)
    for m in range(tl.program_id(0), M, tl.num_programs(0)):
        row = x_ptr + int64(m) * x_stride
        squares = tl.zeros([BLOCK_N], ACC)
        for start in range(0, N, BLOCK_N):
            at = start + n
            x = tl.load(row + at, at < N, 0.0, eviction_policy="evict_last").to(ACC)
            squares += x * x
        r = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / N + eps)
        tl.store(r_ptr + m, r)
        for start in range(0, N, BLOCK_N):
            at = start + n
            x = tl.load(row + at, at < N, 0.0, eviction_policy="evict_first").to(ACC)
            w = tl.load(w_ptr + at, at < N, 0.0).to(ACC)
            tl.store(y_ptr + int64(m) * N + at, x * r * w, at < N)


@triton.jit
def _backward(
    dy_ptr, x_ptr, w_ptr, r_ptr, dx_ptr, dw_ptr, M, N, dy_stride, x_stride,
    BLOCK_N: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BLOCK_N)
    w = tl.load(w_ptr + n, n < N, 0.0).to(ACC)
    dw = tl.zeros([BLOCK_N], ACC)
    for m in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=STAGES):
        row = int64(m)
        dy = tl.load(dy_ptr + row * dy_stride + n, n < N, 0.0).to(ACC)
        x = tl.load(x_ptr + row * x_stride + n, n < N, 0.0).to(ACC)
        r = tl.load(r_ptr + m)
        g = dy * w
        pull = r * r * tl.sum(g * x, axis=0) / N  # how much of g points along x
        tl.store(dx_ptr + row * N + n, r * (g - x * pull), n < N)
        dw += dy * x * r
    tl.store(dw_ptr + int64(tl.program_id(0)) * N + n, dw, n < N)


@triton.jit
def _backward_wide(
    dy_ptr, x_ptr, w_ptr, r_ptr, dx_ptr, M, N, dy_stride, x_stride, BLOCK_N: tl.constexpr, ACC: tl.constexpr
):
    n = tl.arange(0, BLOCK_N)
    for m in range(tl.program_id(0), M, tl.num_programs(0)):
        row = int64(m)
        along = tl.zeros([BLOCK_N], ACC)
        for start in range(0, N, BLOCK_N):
            at = start + n
            dy = tl.load(dy_ptr + row * dy_stride + at, at < N, 0.0, eviction_policy="evict_last").to(ACC)
            x = tl.load(x_ptr + row * x_stride + at, at < N, 0.0, eviction_policy="evict_last").to(ACC)
            along += dy * tl.load(w_ptr + at, at < N, 0.0).to(ACC) * x
        r = tl.load(r_ptr + m)
        pull = r * r * tl.sum(along, axis=0) / N
        for start in range(0, N, BLOCK_N):
            at = start + n
            dy = tl.load(dy_ptr + row * dy_stride + at, at < N, 0.0).to(ACC)
            x = tl.load(x_ptr + row * x_stride + at, at < N, 0.0).to(ACC)
            g = dy * tl.load(w_ptr + at, at < N, 0.0).to(ACC)
            tl.store(dx_ptr + row * N + at, r * (g - x * pull), at < N)


@triton.jit
def _dw_wide(
    dy_ptr, x_ptr, r_ptr, dw_ptr, M, N, dy_stride, x_stride, ROWS, BLOCK_N: tl.constexpr, ACC: tl.constexpr
):  # one program owns BLOCK_N features of ROWS rows
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * ROWS
    dw = tl.zeros([BLOCK_N], ACC)
    for m in range(first, min(first + ROWS, M)):
        row = int64(m)
        dy = tl.load(dy_ptr + row * dy_stride + n, n < N, 0.0).to(ACC)
        x = tl.load(x_ptr + row * x_stride + n, n < N, 0.0).to(ACC)
        dw += dy * x * tl.load(r_ptr + m)
    tl.store(dw_ptr + int64(tl.program_id(1)) * N + n, dw, n < N)


def forward(
    x: torch.Tensor, w: torch.Tensor, eps: float, *, block_m: int | None = None, num_warps: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, w = as_rows(x), w.contiguous()
    (M, N), acc = rows.shape, triton_acc(x.dtype)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    r = torch.empty(x.shape[:-1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device)
    if not x.numel():
        return y, r
    if N > WHOLE:
        _forward_wide[(min(M, num_sms(x.device)),)](
            rows, w, y, r, M, N, rows.stride(0), eps, BLOCK_N=8192, ACC=acc, num_warps=num_warps or 16
        )
        return y, r
    block_n = next_power_of_2(N)
    block_m = block_m or max(1, 2048 // block_n)
    warps = num_warps or min(max(block_m * block_n // 512, 1), 16)
    _forward[(triton.cdiv(M, block_m),)](
        rows, w, y, r, M, N, rows.stride(0), eps, BLOCK_M=block_m, BLOCK_N=block_n, ACC=acc, num_warps=warps
    )
    return y, r


def backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, eps: float,
    *, programs_per_sm: int | None = None, num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    dys, rows, w = as_rows(dy), as_rows(x), w.contiguous()
    (M, N), acc, sms = rows.shape, triton_acc(x.dtype), num_sms(x.device)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return dx, torch.zeros_like(w)
    if N > WHOLE:
        _backward_wide[(min(M, sms),)](
            dys, rows, w, r, dx, M, N, dys.stride(0), rows.stride(0), BLOCK_N=8192, ACC=acc, num_warps=16
        )
        splits = min(M, 16)
        partial = torch.empty(splits, N, dtype=r.dtype, device=x.device)
        _dw_wide[(triton.cdiv(N, 1024), splits)](
            dys, rows, r, partial, M, N, dys.stride(0), rows.stride(0), triton.cdiv(M, splits),
            BLOCK_N=1024, ACC=acc, num_warps=4,
        )  # fmt: skip
        return dx, column_sum(partial, w.dtype)
    block_n = next_power_of_2(N)
    programs = min(M, sms * (programs_per_sm or max(1, min(4, 8192 // block_n))))
    partial = torch.empty(programs, N, dtype=r.dtype, device=x.device)
    _backward[(programs,)](
        dys, rows, w, r, dx, partial, M, N, dys.stride(0), rows.stride(0),
        BLOCK_N=block_n, ACC=acc, STAGES=2, num_warps=num_warps or min(max(block_n // 512, 1), 16),
    )  # fmt: skip
    return dx, column_sum(partial, w.dtype)
