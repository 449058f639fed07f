"""Other implementations of BatchNorm, for the benchmark."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.batch_norm.spec import Args
from bagu.ops.contract.signature import accumulator


def eager(a: Args) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """PyTorch's implementation. It overwrites the running statistics, so it gets copies of them."""
    acc = accumulator(a.x.dtype)  # on CUDA the weight has the statistics' dtype, and fp32 is the faster one
    mean, var = (None if s is None else s.to(acc, copy=True) for s in (a.running_mean, a.running_var))
    scale, shift = (None if p is None else p.to(acc) for p in (a.w, a.b))
    y = F.batch_norm(a.x, mean, var, scale, shift, a.training, a.momentum, a.eps)
    return F.relu(y) if a.relu else y, mean, var
