"""What Triton backends share on the host side: row views, accumulators, grid sizes. Imports without Triton."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__all__ = ["as_rows", "next_power_of_2", "num_sms", "triton_acc"]

H200_SMS = 132  # assumed where there is no device to ask: the interpreter, meta tensors, the compile gate


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as [M, N] with unit stride along N; a view where the strides allow one, else a copy."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]) if x.ndim != 2 else x
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def num_sms(device: torch.device) -> int:
    """How many programs run at once, at one per multiprocessor."""
    if device.type != "cuda":
        return H200_SMS if device.type == "meta" else 2  # in the interpreter, few programs with many rows each
    return _sms(device.index if device.index is not None else torch.cuda.current_device())


@cache
def _sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def triton_acc(dtype: torch.dtype) -> Any:
    """The Triton dtype sums are kept in: fp32, or fp64 for fp64 inputs."""
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32
