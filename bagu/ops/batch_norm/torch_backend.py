"""BatchNorm in PyTorch: for CPUs and torch.compile, and as readable formulas."""

from __future__ import annotations

import torch

from bagu.ops.batch_norm.spec import Args
from bagu.ops.contract.signature import accumulator

Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def forward(a: Args) -> Five:
    x, running_mean, running_var = a.x, a.running_mean, a.running_var
    acc = accumulator(x.dtype)
    over, along = [0, *range(2, x.ndim)], (-1, *(1 for _ in x.shape[2:]))
    xf = x.to(acc)
    if a.training:
        mean = xf.mean(over)
        off = xf - mean.view(along)
        var = off.square().mean(over)
    else:
        assert running_mean is not None and running_var is not None
        mean, var = running_mean.to(acc, copy=True), running_var.to(acc)
        off = xf - mean.view(along)
    r = torch.rsqrt(var + a.eps)
    y = off * r.view(along)
    y = y if a.w is None else y * a.w.to(acc).view(along)
    y = y if a.b is None else y + a.b.to(acc).view(along)
    y = y.relu() if a.relu else y
    n = x.numel() // max(x.shape[1], 1)
    if running_mean is not None and running_var is not None and not (a.training and n):
        new_mean, new_var = running_mean.to(acc, copy=True), running_var.to(acc, copy=True)
    else:
        new_mean, new_var = mean.detach().clone(), var.detach() * (n / max(n - 1, 1))
        if running_mean is not None and running_var is not None:
            new_mean = torch.lerp(running_mean.to(acc), new_mean, a.momentum)
            new_var = torch.lerp(running_var.to(acc), new_var, a.momentum)
    return y.to(x.dtype), new_mean, new_var, mean, r


def backward(
    a: Args, dy: torch.Tensor, mean: torch.Tensor, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    x, w, b = a.x, a.w, a.b
    acc = r.dtype
    over, along = [0, *range(2, x.ndim)], (-1, *(1 for _ in x.shape[2:]))
    dyf, rf = dy.to(acc), r.view(along)
    xhat = (x.to(acc) - mean.view(along)) * rf
    if a.relu:
        z = xhat if w is None else xhat * w.to(acc).view(along)
        z = z if b is None else z + b.to(acc).view(along)
        dyf = torch.where(z <= 0, 0.0, dyf)
    db, dw = dyf.sum(over), (dyf * xhat).sum(over)
    dx = dyf * rf if w is None else dyf * rf * w.to(acc).view(along)
    if a.training:
        n = max(x.numel() // max(x.shape[1], 1), 1)
        scale = rf if w is None else rf * w.to(acc).view(along)
        dx = scale * (dyf - db.view(along) / n - xhat * dw.view(along) / n)
    return dx.to(x.dtype), None if w is None else dw.to(w.dtype), None if b is None else db.to(b.dtype)
