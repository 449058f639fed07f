"""int8 dequantization on Triton: one product per number, so memory is the limit.

Contiguous rows are processed as one long row (`_flat`): a program owns BLOCK numbers, aligned for any N. They span at
most two rows, and each number takes the scale of its row. Rows with gaps between them, or shorter than FLAT, are
cut into tiles, and a scale is loaded once per program (tensor), row or column.
"""

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.launch import as_rows, next_power_of_2
from bagu.ops.kernels.scalars import int64

FLAT = 512  # shorter rows are cut into tiles
TUNABLE = {"forward": {"block": (512, 4096), "num_warps": (4, 8)}}  # the tests run every combination


@triton.jit
def _dequantize(
    q_ptr, scale_ptr, y_ptr, M, N, q_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BLOCK_N)
    m = (tl.program_id(0) // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) % across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = (m < M)[:, None] & (n < N)[None, :]
    q = tl.load(q_ptr + m[:, None] * q_stride + n[None, :], real, 0).to(ACC)
    if BY == "tensor":
        scale = tl.load(scale_ptr).to(ACC)
    elif BY == "row":
        scale = tl.load(scale_ptr + m, m < M, 0.0).to(ACC)[:, None]
    else:
        scale = tl.load(scale_ptr + n, n < N, 0.0).to(ACC)[None, :]
    tl.store(y_ptr + m[:, None] * N + n[None, :], q * scale, real)


@triton.jit
def _flat(
    q_ptr, scale_ptr, y_ptr, M, N, BLOCK: tl.constexpr, BY: tl.constexpr, ALIGNED: tl.constexpr, ACC: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    left = int64(M) * N - first
    mask = i < (tl.multiple_of(left, 16) if ALIGNED else left)
    row = first // N
    column = (first - row * N).to(tl.int32)  # of the first number; N - column numbers are in its row
    if BY == "tensor":
        scale = tl.load(scale_ptr).to(ACC)
    elif BY == "row":
        here = tl.load(scale_ptr + row).to(ACC)
        following = tl.load(scale_ptr + row + 1, row + 1 < M, 0.0).to(ACC)
        scale = tl.where(i < N - column, here, following)
    else:
        n = column + i
        scale = tl.load(scale_ptr + tl.where(n < N, n, n - N), mask, 0.0).to(ACC)
    if not ALIGNED and left >= BLOCK:  # without a mask: with a mask of unknown length Triton moves single numbers
        tl.store(y_ptr + first + i, tl.load(q_ptr + first + i).to(ACC) * scale)
    else:
        tl.store(y_ptr + first + i, tl.load(q_ptr + first + i, mask, 0).to(ACC) * scale, mask)


def forward(
    q: torch.Tensor,
    scale: torch.Tensor,
    granularity: str,
    dtype: str,
    *,
    block: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor]:
    y = torch.empty(q.shape, dtype=getattr(torch, dtype), device=q.device)
    if not q.numel():
        return (y,)
    rows, scale = as_rows(q), scale.contiguous()
    M, N = rows.shape
    block = block or (4096 if granularity != "channel" else 1024)
    acc, warps = tl.float64 if torch.float64 in (y.dtype, scale.dtype) else tl.float32, num_warps or 4
    if rows.is_contiguous() and FLAT <= N < 2**31:
        block = min(block, next_power_of_2(N + 1) // 2)  # at most N, so that a program spans at most two rows
        _flat[(triton.cdiv(M * N, block),)](
            rows, scale, y, M, N, BLOCK=block, BY=granularity, ALIGNED=M * N % 16 == 0, ACC=acc, num_warps=warps
        )
        return (y,)
    block_n = min(next_power_of_2(N), min(block, 512 if granularity == "channel" else 4096))
    block_m = block // block_n
    _dequantize[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
        rows, scale, y, M, N, rows.stride(0), BLOCK_M=block_m, BLOCK_N=block_n, BY=granularity, ACC=acc, num_warps=warps
    )
    return (y,)
