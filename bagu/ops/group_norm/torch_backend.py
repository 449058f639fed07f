"""GroupNorm in PyTorch: for CPUs and torch.compile, and as readable formulas."""

from __future__ import annotations

import torch

from bagu.ops.contract.signature import accumulator
from bagu.ops.group_norm.spec import Args


def forward(a: Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = a.x
    acc, along = accumulator(x.dtype), (-1, *(1 for _ in x.shape[2:]))
    rows = _by_group(x.to(acc), a.groups)
    mean = rows.mean(2)
    off = rows - mean.unsqueeze(2)
    r = torch.rsqrt(off.square().mean(2) + a.eps)
    y = (off * r.unsqueeze(2)).reshape(x.shape)
    y = y if a.w is None else y * a.w.to(acc).view(along)
    y = y if a.b is None else y + a.b.to(acc).view(along)
    return y.to(x.dtype), mean, r


def backward(
    a: Args, dy: torch.Tensor, mean: torch.Tensor, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    x, w = a.x, a.w
    acc, over, along = r.dtype, [0, *range(2, x.ndim)], (-1, *(1 for _ in x.shape[2:]))
    dyf, rf = dy.to(acc), r.unsqueeze(2)
    xhat = (_by_group(x.to(acc), a.groups) - mean.unsqueeze(2)) * rf
    g = _by_group(dyf if w is None else dyf * w.to(acc).view(along), a.groups)
    dx = rf * (g - g.mean(2, keepdim=True) - xhat * (g * xhat).mean(2, keepdim=True))
    dw = None if w is None else (dyf * xhat.reshape(x.shape)).sum(over).to(w.dtype)
    db = None if a.b is None else dyf.sum(over).to(a.b.dtype)
    return dx.reshape(x.shape).to(x.dtype), dw, db


def _by_group(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[B, C, *S] as [B, groups, D * S]."""
    return x.unflatten(1, (groups, -1)).flatten(2)
