"""RMSNorm in PyTorch: what runs on a CPU, what the compiler fuses, and the formulas in the open."""

from __future__ import annotations

import torch

from bagu.ops.signature import accumulator


def forward(x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    acc = accumulator(x.dtype)
    xf = x.to(acc)
    r = torch.rsqrt(xf.square().mean(-1) + eps)
    return (xf * r.unsqueeze(-1) * w.to(acc)).to(x.dtype), r


def backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    acc = r.dtype
    dyf, xf, rf = dy.to(acc), x.to(acc), r.unsqueeze(-1)
    g = dyf * w.to(acc)
    dx = rf * (g - xf * rf.square() * (g * xf).mean(-1, keepdim=True))
    dw = (dyf * xf * rf).flatten(0, -2).sum(0) if x.ndim > 1 else dyf * xf * rf
    return dx.to(x.dtype), dw.to(w.dtype)
