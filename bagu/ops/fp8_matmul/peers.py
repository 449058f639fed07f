"""Other implementations of the fp8 linear layer, for the benchmark."""

from __future__ import annotations

from typing import Any

import torch

from bagu.errors import NotOffered
from bagu.ops.activations import activate
from bagu.ops.fp8_matmul.torch_backend import takes_scaled_mm
from bagu.ops.int8_matmul.peers import cublas_bf16 as _cublas_bf16


def eager(
    x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, activation: str | None, dtype: str,
) -> torch.Tensor:  # fmt: skip
    """torch._scaled_mm, and an op for each part of the epilogue."""
    if x.ndim != 2 or not takes_scaled_mm(x, w, dtype):
        raise NotOffered("torch._scaled_mm with a scale per row needs Hopper and sizes that are multiples of 16")
    z = torch._scaled_mm(x, w.T, x_scale.unsqueeze(-1), w_scale.unsqueeze(0), bias, out_dtype=getattr(torch, dtype))
    y = activate(z, activation)
    return y if residual is None else y + residual


def cublas_bf16(x: torch.Tensor, w: torch.Tensor, **_: Any) -> None:
    """A yardstick: the product of bf16 matrices of the same sizes."""
    _cublas_bf16(x, w)
