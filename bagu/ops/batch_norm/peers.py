"""Other implementations of BatchNorm, for the benchmark."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.contract.signature import accumulator


def eager(
    x: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    relu: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """PyTorch's implementation. It overwrites the running statistics, so it gets copies of them."""
    acc = accumulator(x.dtype)  # on CUDA the weight has the statistics' dtype, and fp32 is the faster one
    mean, var = (None if s is None else s.to(acc, copy=True) for s in (running_mean, running_var))
    scale, shift = (None if p is None else p.to(acc) for p in (w, b))
    y = F.batch_norm(x, mean, var, scale, shift, training, momentum, eps)
    return F.relu(y) if relu else y, mean, var
