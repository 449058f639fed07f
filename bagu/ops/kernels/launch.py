"""Host code shared by backends: row views, accumulators, grid sizes, the GPU's generation.

It imports without Triton.
"""

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from bagu.ops.call.eager import constant

FEW = 2**33  # rows times numbers of a weight: 2,048 rows of 1,024 features to 4,096. See `few_rows`
DECODES = 64  # rows of a short step
H200_SMS = 132  # used if there is no device to query: the interpreter, meta tensors, the compile gate


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as [M, N] with unit stride along N; a view if the strides allow it, else a copy."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]) if x.ndim != 2 else x
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def few_rows(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether x[*M, K] wᵀ is so short on a GPU that the host is the limit: then a block of several products runs as one
    op, by kernels of our own (kernels/products.py)."""
    return x.element_size() == 2 and x.shape[:-1].numel() * w.numel() <= FEW


def channels_last(x: torch.Tensor) -> bool:
    """Whether x[B, C, *S] is packed as [B, *S, C] in memory."""
    return x.ndim > 2 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """An uninitialized tensor of x's shape: contiguous, or with channels last if x has them there."""
    return x.new_empty_strided(x.shape, x.stride()) if channels_last(x) else x.new_empty(x.shape)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def split_row(N: int, most: int = 4) -> tuple[int, int]:
    """Split a row into a block, a power of two, and a tail after it: (4,096, 1,024) for N = 5,120.

    A tail has at least 16 columns, some of them possibly masked, and at most block / `most`. If that is not possible,
    there is no tail and the block is masked: (8,192, 0) for N = 7,168.
    """
    block = next_power_of_2(N)
    half, past = block // 2, N - block // 2
    return (half, max(next_power_of_2(past), 16)) if block >= 1024 and past <= half // most else (block, 0)


def aligned(*rows: torch.Tensor) -> bool:
    """Whether Triton can prove that each row begins at a multiple of 16 elements, which allows 128-bit loads."""
    return all(r.shape[1] % 16 == 0 and r.stride(0) % 16 == 0 for r in rows)


def num_sms(device: torch.device) -> int:
    """The number of multiprocessors: how many programs run at once with one on each."""
    if device.type != "cuda":
        return H200_SMS if device.type == "meta" else _interpreted_sms
    return _sms(_index(device))


_interpreted_sms = 2  # few programs with many rows each, so that tests run every loop over rows at low cost


@contextmanager
def interpreted_sms(count: int | None) -> Iterator[None]:
    """Inside, Triton's interpreter reports this many multiprocessors; None keeps the current number."""
    global _interpreted_sms
    before = _interpreted_sms
    _interpreted_sms = before if count is None else count
    try:
        yield
    finally:
        _interpreted_sms = before


@constant
def is_hopper(device: torch.device) -> bool:
    """Whether a CUDA device is a Hopper GPU or a later one."""
    return _capability(_index(device)) >= (9, 0)


def starts_early(device: torch.device, rows: int = 0) -> bool:
    """Whether a kernel is a dependent launch, which starts before the previous kernel ends (early.py): where the GPU
    can, and for so few rows that a launch takes a part of the time. The interpreter has none."""
    return rows <= DECODES and (device.type == "meta" or (device.type == "cuda" and is_hopper(device)))


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


@cache
def _sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def fp32_pair(value: float) -> tuple[float, float]:
    """A float as the sum of two fp32: a kernel receives scalars as fp32, and fp64 rows need full precision."""
    high = ctypes.c_float(value).value
    return high, value - high if math.isfinite(high) else 0.0


def triton_acc(dtype: torch.dtype) -> Any:
    """The Triton dtype of accumulators: fp32, or fp64 for fp64 inputs."""
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32
