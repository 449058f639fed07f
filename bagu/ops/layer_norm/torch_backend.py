"""LayerNorm in PyTorch: what runs on a CPU, what the compiler fuses, and the formulas in the open."""

from __future__ import annotations

import torch

from bagu.ops.signature import accumulator


def forward(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    acc = accumulator(x.dtype)
    xf = x.to(acc)
    mean = xf.mean(-1)
    centred = xf - mean.unsqueeze(-1)
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * rstd.unsqueeze(-1) * w.to(acc)
    return (y if b is None else y + b.to(acc)).to(x.dtype), mean, rstd


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    acc = rstd.dtype
    dyf, rf = dy.to(acc), rstd.unsqueeze(-1)
    h = (x.to(acc) - mean.unsqueeze(-1)) * rf
    g = dyf * w.to(acc)
    dx = rf * (g - g.mean(-1, keepdim=True) - h * (g * h).mean(-1, keepdim=True))
    rows = tuple(range(x.ndim - 1))
    dw = (dyf * h).sum(rows) if rows else dyf * h
    db = None if b is None else (dyf.sum(rows) if rows else dyf).to(b.dtype)
    return dx.to(x.dtype), dw.to(w.dtype), db
