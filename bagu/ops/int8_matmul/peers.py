"""Other implementations of the int8 linear layer, for the benchmark."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from bagu.errors import NotOffered
from bagu.ops.activations import activate
from bagu.ops.int8_matmul.spec import Args


def eager(a: Args) -> torch.Tensor:
    """torch._int_mm, and the scales in separate kernels."""
    if a.x.ndim != 2 or a.x.shape[0] <= 16:
        raise NotOffered("torch._int_mm multiplies matrices of more than 16 rows")
    z = torch._int_mm(a.x, a.w.T) * a.x_scale.unsqueeze(-1) * a.w_scale
    return activate(z if a.bias is None else z + a.bias, a.activation).to(getattr(torch, a.dtype))


def cublas_bf16(x: torch.Tensor, w: torch.Tensor, **_: Any) -> None:
    """A yardstick: the product of bf16 matrices of the same sizes."""
    a, b = _random(x.shape[:-1].numel(), w.shape[0], x.shape[-1], x.device)
    torch.mm(a, b.T)


@lru_cache(maxsize=1)
def _random(M: int, N: int, K: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.randn(M, K, dtype=torch.bfloat16, device=device),
        torch.randn(N, K, dtype=torch.bfloat16, device=device),
    )
