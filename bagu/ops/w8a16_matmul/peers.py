"""Other implementations of the linear layer with an 8-bit weight, for the benchmark."""

from typing import Any

import torch

from bagu.ops.int8_matmul.peers import cublas_bf16 as _cublas_bf16


def eager(x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The weight is dequantized to the dtype of x for each call."""
    return torch.nn.functional.linear(x, (w.to(w_scale.dtype) * w_scale.unsqueeze(1)).to(x.dtype), bias)


def cublas_bf16(x: torch.Tensor, w: torch.Tensor, **_: Any) -> None:
    """A yardstick: the product of bf16 matrices of the same sizes."""
    _cublas_bf16(x, w)
