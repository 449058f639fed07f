"""Other implementations of the fp8 linear layer, for the benchmark."""

from __future__ import annotations

from typing import Any

import torch

from bagu.errors import NotOffered
from bagu.ops.activations import activate
from bagu.ops.fp8_matmul.spec import Args, takes_scaled_mm
from bagu.ops.int8_matmul.peers import cublas_bf16 as _cublas_bf16


def eager(a: Args) -> torch.Tensor:
    """torch._scaled_mm, and an op for each part of the epilogue."""
    if a.x.ndim != 2 or not takes_scaled_mm(a.x, a.w, a.dtype):
        raise NotOffered("torch._scaled_mm with a scale per row needs Hopper and sizes that are multiples of 16")
    z = torch._scaled_mm(
        a.x, a.w.T, a.x_scale.unsqueeze(-1), a.w_scale.unsqueeze(0), a.bias, out_dtype=getattr(torch, a.dtype)
    )
    y = activate(z, a.activation)
    return y if a.residual is None else y + a.residual


def cublas_bf16(x: torch.Tensor, w: torch.Tensor, **_: Any) -> None:
    """A yardstick: the product of bf16 matrices of the same sizes."""
    _cublas_bf16(x, w)
