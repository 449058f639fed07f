"""Quantization to int8 on Triton: memory is the limit, at 3 bytes per bf16 number if a row is read once.

By row: one program owns rows in registers. A row of more than MAX_COLUMNS numbers is read twice, the second time from
the L2.
By tensor: in a first launch each of a few programs writes its largest |x|; each program of the second launch reduces
these, then quantizes a tile. It starts at the end of x, which may still be in the L2 after the first launch.
By channel: the largest |x| of pieces of columns, a small launch that computes scales and their inverses, then tiles.

At 6 numbers per clock and multiprocessor, 20 instructions per number are available: kernels/quantize.py has few.
"""

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.launch import aligned, as_rows, next_power_of_2, num_sms, split_row, triton_acc
from bagu.ops.kernels.quantize import inverse_of, magnitude, quantized, scale_of
from bagu.ops.kernels.rows import columns, load_row, masks, max_row, row_ids, store_row
from bagu.ops.kernels.scalars import int64
from bagu.ops.kv_write.quantize import LARGEST

MAX_COLUMNS = 32768  # per row kept in registers: 64 numbers per thread at 16 warps
TUNABLE = {"forward": {"block": (None, 512, 8192), "num_warps": (4, 8)}}  # the tests run every combination


@triton.jit
def _rows(
    x_ptr, q_ptr, scale_ptr, M, N, x_stride, LARGEST: tl.constexpr,
    FULL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m, n = row_ids(int64(tl.program_id(0)), BLOCK_M), columns(BLOCK_N, TAIL)
    mask = masks(m, n, M, N, FULL)
    x = load_row(x_ptr, m, n, mask, x_stride)
    scale = scale_of(max_row([magnitude(v, ACC) for v in x]), LARGEST, ACC)
    tl.store(scale_ptr + m, tl.zeros([BLOCK_M, 1], ACC) + scale, m < M)
    inverse = inverse_of(scale)
    store_row(q_ptr, m, n, mask, N, [quantized(v, inverse, q_ptr.dtype.element_ty, ACC) for v in x])


@triton.jit
def _rows_wide(
    x_ptr, q_ptr, scale_ptr, M, N, x_stride, LARGEST: tl.constexpr,
    BLOCK_N: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BLOCK_N)
    for m in range(tl.program_id(0), M, tl.num_programs(0)):
        row = x_ptr + int64(m) * x_stride
        top = magnitude(tl.zeros([BLOCK_N], ACC), ACC)
        for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
            at = start + n
            top = tl.maximum(top, magnitude(tl.load(row + at, at < N, 0.0), ACC))
        scale = scale_of(tl.max(top, axis=0), LARGEST, ACC)
        inverse = inverse_of(scale)
        tl.store(scale_ptr + m, scale)
        for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
            at = start + n
            x = tl.load(row + at, at < N, 0.0)
            tl.store(q_ptr + int64(m) * N + at, quantized(x, inverse, q_ptr.dtype.element_ty, ACC), at < N)


@triton.jit
def tensor_top(
    x_ptr, top_ptr, M, N, x_stride, TILES,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The largest |x| of the tiles p, p + P, p + 2P, … for program p of P."""
    across = tl.cdiv(N, BLOCK_N)
    top = magnitude(tl.zeros([BLOCK_M, BLOCK_N], ACC), ACC)
    for tile in tl.range(tl.program_id(0), TILES, tl.num_programs(0), num_stages=STAGES):
        m = int64(tile // across) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        n = int64(tile % across) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        top = tl.maximum(top, magnitude(tl.load(x_ptr + m * x_stride + n, (m < M) & (n < N), 0.0), ACC))
    tl.store(top_ptr + tl.program_id(0), tl.max(tl.max(top, axis=1), axis=0))


@triton.jit
def _channel_top(
    x_ptr, top_ptr, M, N, x_stride, ROWS,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The largest |x| of each of BLOCK_N columns in a piece of ROWS rows."""
    across = tl.cdiv(N, BLOCK_N)
    piece = tl.program_id(0) // across
    n = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    top = magnitude(tl.zeros([BLOCK_M, BLOCK_N], ACC), ACC)
    for start in tl.range(piece * ROWS, min(piece * ROWS + ROWS, M), BLOCK_M, num_stages=STAGES):
        m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        real = (m < M)[:, None] & (n < N)[None, :]
        top = tl.maximum(top, magnitude(tl.load(x_ptr + m[:, None] * x_stride + n[None, :], real, 0.0), ACC))
    tl.store(top_ptr + int64(piece) * N + n, tl.max(top, axis=0), n < N)


@triton.jit
def _channel_scales(
    top_ptr, scale_ptr, inverse_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr
):
    """scale[n] and its inverse from the largest |x| of P pieces of column n."""
    p, n = tl.arange(0, BLOCK_P), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = (p < P)[:, None] & (n < N)[None, :]
    top = tl.load(top_ptr + p[:, None].to(tl.int64) * N + n[None, :], real, 0)
    scale = scale_of(tl.max(top, axis=0), 127.0, ACC)
    tl.store(scale_ptr + n, scale, n < N)
    tl.store(inverse_ptr + n, inverse_of(scale), n < N)


@triton.jit
def _tiles(
    x_ptr, top_ptr, inverse_ptr, q_ptr, scale_ptr, P, M, N, x_stride,
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr, CHANNEL: tl.constexpr,
):  # fmt: skip
    """Quantize a tile, the last one first, by the column's scale or by the scale computed from the P maxima."""
    across = tl.cdiv(N, BLOCK_N)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    m = (tile // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tile % across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = (m < M)[:, None] & (n < N)[None, :]
    x = tl.load(x_ptr + m[:, None] * x_stride + n[None, :], real, 0.0)
    if CHANNEL:
        inverse = tl.load(inverse_ptr + n, n < N, 0.0)[None, :]
    else:
        p = tl.arange(0, BLOCK_P)
        scale = scale_of(tl.max(tl.load(top_ptr + p, p < P, 0), axis=0), 127.0, ACC)
        inverse = inverse_of(scale)
        tl.store(scale_ptr, scale, tile == 0)
    tl.store(q_ptr + m[:, None] * N + n[None, :], quantized(x, inverse, tl.int8, ACC), real)


def forward(
    x: torch.Tensor, granularity: str, *, block: int | None = None, num_warps: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`block` is the number of values that a program holds at a time; a row of up to MAX_COLUMNS is held entirely."""
    kept = torch.float64 if x.dtype == torch.float64 else torch.float32
    shape = {"tensor": (1,), "row": x.shape[:-1], "channel": x.shape[-1:]}[granularity]
    q = torch.empty_like(x, dtype=torch.int8, memory_format=torch.contiguous_format)
    if not x.numel():
        return q, torch.zeros(shape, dtype=kept, device=x.device)
    scale = torch.empty(shape, dtype=kept, device=x.device)
    if granularity == "row":
        quantize_rows(as_rows(x), q, scale, block, num_warps)
    else:
        _by_many_rows(as_rows(x), q, scale, granularity == "channel", block or 8192, num_warps or 8)
    return q, scale


def quantize_rows(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, block: int | None = None, num_warps: int | None = None
) -> None:
    """Fill q, which is int8 or e4m3, and the scales of its rows."""
    (M, N), acc, largest = x.shape, triton_acc(x.dtype), LARGEST[q.dtype]
    if N > MAX_COLUMNS:
        stages = 3 if aligned(x) else 1  # asynchronous copies of single numbers spill registers
        _rows_wide[(min(M, num_sms(x.device)),)](
            x, q, scale, M, N, x.stride(0), largest, BLOCK_N=16384, ACC=acc, STAGES=stages, num_warps=32
        )
    else:
        block_m = max((block or 2048) // next_power_of_2(N), 1)
        block_n, tail = split_row(N) if block_m == 1 else (next_power_of_2(N), 0)
        _rows[(triton.cdiv(M, block_m),)](
            x, q, scale, M, N, x.stride(0), largest,
            FULL=block_n <= N, BLOCK_M=block_m, BLOCK_N=block_n, TAIL=tail, ACC=acc,
            num_warps=num_warps or min(max(block_m * block_n // 1024, 1), 16),
        )  # fmt: skip


def _by_many_rows(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, channel: bool, block: int, num_warps: int
) -> None:
    """Fill q and scale; the scale is that of the tensor or of each column."""
    (M, N), acc, sms = x.shape, triton_acc(x.dtype), num_sms(x.device)
    block_n = min(next_power_of_2(N), block, 512 if channel else 2048)
    block_m = block // block_n
    across, down = triton.cdiv(N, block_n), triton.cdiv(M, block_m)
    tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "ACC": acc, "num_warps": num_warps}
    pieces = min(down, max(8 * sms // across, 1)) if channel else min(down * across, 4 * sms)
    bits = torch.int64 if x.dtype == torch.float64 else torch.int32
    top = torch.empty((pieces, N) if channel else pieces, dtype=bits, device=x.device)
    inverse = torch.empty_like(scale)
    if channel:
        rows = triton.cdiv(down, pieces) * block_m
        _channel_top[(across * pieces,)](x, top, M, N, x.stride(0), rows, STAGES=3, **tile)
        block_p = next_power_of_2(pieces)
        columns = max(4096 // block_p, 1)
        _channel_scales[(triton.cdiv(N, columns),)](
            top, scale, inverse, pieces, N, BLOCK_P=block_p, BLOCK_N=columns, ACC=acc, num_warps=4
        )
    else:
        tensor_top[(pieces,)](x, top, M, N, x.stride(0), down * across, STAGES=3, **tile)
    _tiles[(across * down,)](
        x, top, inverse, q, scale, pieces, M, N, x.stride(0),
        BLOCK_P=1 if channel else next_power_of_2(pieces), CHANNEL=channel, **tile,
    )  # fmt: skip
