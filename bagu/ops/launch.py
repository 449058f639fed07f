"""What Triton backends share on the host side: row views, accumulators, grid sizes. Imports without Triton."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

__all__ = [
    "alike", "as_rows", "blocks", "fp32_pair", "interpreted_sms", "next_power_of_2", "num_sms", "splits", "triton_acc",
    "vector", "walk",
]  # fmt: skip

H200_SMS = 132  # assumed where there is no device to ask: the interpreter, meta tensors, the compile gate


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as [M, N] with unit stride along N; a view where the strides allow one, else a copy."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]) if x.ndim != 2 else x
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def vector(*rows: torch.Tensor) -> int:
    """How many elements 16 bytes hold, where rows lie without gaps and begin anywhere in them; else 0.

    Triton asks of an N whether it is a multiple of 16. One of 8 leaves every row of bf16 aligned, and a kernel that is
    not told reads it number by number; so it is cut as if it began anywhere.
    """
    wide = 16 // rows[0].element_size()
    return wide if rows[0].shape[1] % 16 and all(r.is_contiguous() for r in rows) else 0


def blocks(N: int, vec: int, most: int = 4) -> tuple[int, int]:
    """The block of a row, and how many columns are apart from it: (4,096, 1,024) for N = 5,120.

    Of an odd row (see `vector`) the two ends are apart: (4,096, 16) for 4,097 bf16. Of others what is past the largest
    power of two, where that is at most a `most`-th of it: a masked block would leave its registers empty.
    """
    if vec:
        return next_power_of_2(max((N - 1) // vec, 1) * vec), 2 * vec
    block = next_power_of_2(N)
    half, past = block // 2, N - block // 2
    return (half, max(next_power_of_2(past), 16)) if block >= 1024 and past <= half // most else (block, 0)


def alike(programs: int, tiles: int, vec: int) -> int:
    """About so many programs that go through `tiles` rows together, each with rows that begin alike: a multiple of vec,
    or one a row."""
    return tiles if programs >= tiles else min(max(programs // vec, 1) * vec, tiles) if vec else programs


def walk(rows: torch.Tensor) -> dict[str, int]:
    """The options of a kernel that walks a row twice: small programs, one a row.

    On an H200 they reach 0.61 of copy bandwidth at 1024 x 131,072; one program of 16 warps a multiprocessor, whose rows
    the L2 holds for the second walk, reaches 0.47.
    """
    return {"BLOCK_N": 2048 // max(rows.element_size() // 4, 1), "num_warps": 4}


def splits(M: int, N: int, vec: int, sms: int) -> tuple[tuple[int, int], int]:
    """The grid of a kernel whose programs own 1,024 columns of some rows, four at a time, and the most rows of one.

    About 16 programs a multiprocessor. With `vec` a split has every vec-th row, and one program more, for their ends.
    """
    step = max(vec, 1)
    columns = -(-((N - (vec > 0)) // step * step) // 1024) + (vec > 0)
    tiles = -(-M // (4 * step))
    parts = min(tiles, -(-16 * sms // (columns * step)))
    return (columns, parts * step), 4 * -(-tiles // parts)


def num_sms(device: torch.device) -> int:
    """How many programs run at once, at one per multiprocessor."""
    if device.type != "cuda":
        return H200_SMS if device.type == "meta" else _interpreted_sms
    return _sms(device.index if device.index is not None else torch.cuda.current_device())


_interpreted_sms = 2  # few programs with many rows each: every loop over rows runs, at little cost


@contextmanager
def interpreted_sms(count: int | None) -> Iterator[None]:
    """Inside, Triton's interpreter claims this many multiprocessors; None leaves the number as it is."""
    global _interpreted_sms
    before = _interpreted_sms
    _interpreted_sms = before if count is None else count
    try:
        yield
    finally:
        _interpreted_sms = before


@cache
def _sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def fp32_pair(value: float) -> tuple[float, float]:
    """A float as the sum of two fp32, since a kernel receives fp32 and an fp64 row deserves all of it."""
    high = ctypes.c_float(value).value
    return high, value - high if math.isfinite(high) else 0.0


def triton_acc(dtype: torch.dtype) -> Any:
    """The Triton dtype sums are kept in: fp32, or fp64 for fp64 inputs."""
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32
