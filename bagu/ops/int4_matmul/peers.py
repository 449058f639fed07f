"""Other implementations of the 4-bit linear layer, for the benchmark."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from bagu.ops.int4_matmul.layout import dequantize_int4
from bagu.ops.int4_matmul.spec import Args


def eager(a: Args) -> torch.Tensor:
    """The weight is dequantized to the dtype of x for each call, which rounds it."""
    return torch.nn.functional.linear(a.x, dequantize_int4(a.packed, a.scales, a.zeros, a.x.dtype), a.bias)


def cublas_bf16(x: torch.Tensor, packed: torch.Tensor, **_: Any) -> None:
    """A yardstick: the product with a bf16 weight of the same size, which has four times the bytes."""
    torch.nn.functional.linear(x.bfloat16(), _random(packed.shape[0], x.shape[-1], x.device))


@lru_cache(maxsize=1)
def _random(N: int, K: int, device: torch.device) -> torch.Tensor:
    return torch.randn(N, K, dtype=torch.bfloat16, device=device)
