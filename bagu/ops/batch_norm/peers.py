"""Other implementations of BatchNorm, for the benchmark."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def eager(
    x: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """PyTorch's implementation. It overwrites the running statistics, so it gets copies of them."""
    mean = None if running_mean is None else running_mean.clone()
    var = None if running_var is None else running_var.clone()
    acc = torch.float32 if mean is None else mean.dtype  # on CUDA the weight has the statistics' dtype
    scale, shift = (None if p is None else p.to(acc) for p in (w, b))
    return F.batch_norm(x, mean, var, scale, shift, training, momentum, eps), mean, var
