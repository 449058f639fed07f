"""Other implementations of the linear layer, for the benchmark."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.activations import activate
from bagu.ops.matmul.spec import Args


def eager(a: Args) -> torch.Tensor:
    """cuBLAS on a GPU, and an op for each part of the epilogue except the bias."""
    if a.row_scale is None and a.column_scale is None:
        z = F.linear(a.x, a.w, a.bias)
    else:
        z = F.linear(a.x, a.w)
        z = z if a.row_scale is None else z * a.row_scale.unsqueeze(-1)
        z = z if a.column_scale is None else z * a.column_scale
        z = z if a.bias is None else z + a.bias
    y = activate(z, a.activation)
    return (y if a.residual is None else y + a.residual).to(a.x.dtype)
