"""Transpose on Triton: a tile is read along x's contiguous dim and written along y's.

Bandwidth is the limit, and it depends on the length of contiguous runs: a tile of 128 x 128 has runs of 256 bytes in
bf16 on both sides (64 x 64 reaches 0.84 of copy bandwidth on an H200, 128 x 128 reaches 0.90). Triton reads in the
order of x's memory and writes in the order of y's, and transposes the tile in shared memory if the two differ.
Neighbouring programs write along y.

Values are moved as bits: every dtype is treated as the integer of its size, so NaN payloads, bools and int64 are
preserved, and four kernels serve all dtypes. Any two dims of any strided tensor reduce to the same kernel: dims that
are adjacent in both tensors are merged, one tile side is y's last dim, the other is the dim with x's smallest stride,
and the remaining dims, at most three, are divided among programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.launch import next_power_of_2
from bagu.ops.kernels.scalars import int64

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SIDE = {1: 128, 2: 128, 4: 64, 8: 32, 16: 32}  # of a transposed tile, by itemsize: runs of 128 bytes or more
TUNABLE = {"forward": {"rows": (64, 128), "columns": (64, 128), "num_warps": (4, 8)}}  # the tests run every combination


@triton.jit
def _move(
    x_ptr, y_ptr, R, C, n1, n2, xr, xc, x0, x1, x2, yr, y0, y1, y2, r_tiles, c_tiles,
    BR: tl.constexpr, BC: tl.constexpr, FAR: tl.constexpr, BATCHED: tl.constexpr,
):  # fmt: skip
    tile, z = tl.program_id(0), 0
    if BATCHED:
        tile, z = tile % (r_tiles * c_tiles), tile // (r_tiles * c_tiles)
    r0, c0 = int64(tile // c_tiles) * BR, int64(tile % c_tiles) * BC
    i0, i1, i2 = int64(z // n2 // n1), int64(z // n2 % n1), int64(z % n2)
    r, c = tl.arange(0, BR)[:, None], tl.arange(0, BC)[None, :]
    real = (r < R - r0) & (c < C - c0)
    if FAR:
        r, c = r.to(tl.int64), c.to(tl.int64)
    x = x_ptr + (i0 * x0 + i1 * x1 + i2 * x2 + r0 * xr + c0 * xc)
    y = y_ptr + (i0 * y0 + i1 * y1 + i2 * y2 + r0 * yr + c0)
    tl.store(y + (r * yr + c), tl.load(x + (r * xr + c * xc), real, eviction_policy="evict_last"), real)


@dataclass(frozen=True, kw_only=True)
class Dims:
    """The dims of y, merged if they are adjacent in x too: (size, stride in x, stride in y)."""

    rows: tuple[int, int, int]
    columns: tuple[int, int, int]  # y's last dim
    others: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, view: torch.Tensor) -> Dims:
        """For y = view.contiguous()."""
        merged: list[list[int]] = []
        for size, stride in zip(view.shape, view.stride(), strict=True):
            if size == 1:
                continue
            if merged and merged[-1][1] == size * stride:
                merged[-1] = [merged[-1][0] * size, stride]
            else:
                merged.append([size, stride])
        dims, step = [], 1
        for size, stride in reversed(merged):
            dims.append((size, stride, step))
            step *= size
        one = (1, 1, step)
        columns, *rest = dims or [one]
        if not rest:
            return cls(rows=one, columns=columns, others=())
        # if y's last dim is contiguous in x too, the tile consists of rows of it, which are neighbours in y
        rows = rest[0] if columns[1] == 1 else min(rest, key=lambda d: d[1])
        return cls(rows=rows, columns=columns, others=tuple(d for d in reversed(rest) if d is not rows))


def _bits(x: torch.Tensor) -> torch.Tensor:
    """x as integers of its size; complex128, the one dtype of 16 bytes, as pairs of integers."""
    if x.element_size() == 16:
        return torch.view_as_real(x).view(torch.int64)
    return x.view(INTEGERS[x.element_size()])


def _tile(dims: Dims, itemsize: int, rows: int | None, columns: int | None) -> tuple[int, int]:
    """How many rows and columns a program moves: a square if the tile is transposed, else long rows."""
    (R, _, yr), (C, xc, _) = dims.rows, dims.columns
    tall, long = _sides(xc * itemsize % 16 == 0, yr * itemsize % 16 == 0, itemsize) if xc != 1 else (16, 256)
    r, room = min(rows or tall, next_power_of_2(R)), min(tall * long, 4096)
    c = min(columns or max(long, room // r), next_power_of_2(C))
    return (r if rows else min(max(r, room // c), next_power_of_2(R))), c  # a narrow side leaves room for the other


def _sides(x_aligned: bool, y_aligned: bool, itemsize: int) -> tuple[int, int]:
    """The sides of a transposed tile, along x's memory and along y's. A side that is not aligned moves single values,
    so the tile is smaller, and longer along the unaligned runs: an odd [16383, 4095] in bf16 reaches 0.70 of copy
    bandwidth on an H200 with 32 x 128 and 0.57 with 64 x 64.
    """
    if x_aligned and y_aligned:
        return SIDE[itemsize], SIDE[itemsize]
    if itemsize > 2:
        return 64, 64
    return (128, 64) if y_aligned else (32, 64 if x_aligned else 128)


def forward(
    x: torch.Tensor,
    dim0: int,
    dim1: int,
    *,
    rows: int | None = None,
    columns: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor]:
    view = x.transpose(dim0, dim1)
    y = torch.empty_like(view, memory_format=torch.contiguous_format)
    if not x.numel():
        return (y,)
    dims = Dims.of(_bits(view))
    if len(dims.others) > 3:  # only a view of a view has so many dims that do not merge
        return forward(x.contiguous(), dim0, dim1, rows=rows, columns=columns, num_warps=num_warps)
    (R, xr, yr), (C, xc, _) = dims.rows, dims.columns
    (n0, x0, y0), (n1, x1, y1), (n2, x2, y2) = ((1, 0, 0),) * (3 - len(dims.others)) + dims.others
    br, bc = _tile(dims, y.element_size(), rows, columns)
    r_tiles, c_tiles = triton.cdiv(R, br), triton.cdiv(C, bc)
    large = br * bc > 8192
    _move[(n0 * n1 * n2 * r_tiles * c_tiles,)](
        _bits(view), _bits(y), R, C, n1, n2, xr, xc, x0, x1, x2, yr, y0, y1, y2, r_tiles, c_tiles,
        BR=br, BC=bc, FAR=br * max(xr, yr) + bc * xc >= 2**31, BATCHED=n0 * n1 * n2 > 1,
        num_warps=num_warps or (8 if large or (br, bc) == (32, 64) else 4),
        maxnreg=64 if large else None,  # 0.907 of copy bandwidth instead of 0.903, 16384 x 4096 in bf16
    )  # fmt: skip
    return (y,)


def backward(dy: torch.Tensor, dim0: int, dim1: int) -> tuple[torch.Tensor]:
    return forward(dy, dim0, dim1)
