"""Other implementations of the linear layer, for the benchmark."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.activations import activate


def eager(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
    row_scale: torch.Tensor | None, column_scale: torch.Tensor | None, activation: str | None,
) -> torch.Tensor:  # fmt: skip
    """cuBLAS on a GPU, and an op for each part of the epilogue except the bias."""
    if row_scale is None and column_scale is None:
        z = F.linear(x, w, bias)
    else:
        z = F.linear(x, w)
        z = z if row_scale is None else z * row_scale.unsqueeze(-1)
        z = z if column_scale is None else z * column_scale
        z = z if bias is None else z + bias
    y = activate(z, activation)
    return (y if residual is None else y + residual).to(x.dtype)
