"""BatchNorm in PyTorch: for CPUs and torch.compile, and as readable formulas."""

from __future__ import annotations

import torch

from bagu.ops.contract.signature import accumulator

Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def forward(
    x: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    relu: bool,
) -> Five:
    acc = accumulator(x.dtype)
    over, along = [0, *range(2, x.ndim)], (-1, *(1 for _ in x.shape[2:]))
    xf = x.to(acc)
    if training:
        mean = xf.mean(over)
        off = xf - mean.view(along)
        var = off.square().mean(over)
    else:
        assert running_mean is not None and running_var is not None
        mean, var = running_mean.to(acc, copy=True), running_var.to(acc)
        off = xf - mean.view(along)
    r = torch.rsqrt(var + eps)
    y = off * r.view(along)
    y = y if w is None else y * w.to(acc).view(along)
    y = y if b is None else y + b.to(acc).view(along)
    y = y.relu() if relu else y
    n = x.numel() // max(x.shape[1], 1)
    if running_mean is not None and running_var is not None and not (training and n):
        new_mean, new_var = running_mean.to(acc, copy=True), running_var.to(acc, copy=True)
    else:
        new_mean, new_var = mean.detach().clone(), var.detach() * (n / max(n - 1, 1))
        if running_mean is not None and running_var is not None:
            new_mean = torch.lerp(running_mean.to(acc), new_mean, momentum)
            new_var = torch.lerp(running_var.to(acc), new_var, momentum)
    return y.to(x.dtype), new_mean, new_var, mean, r


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    mean: torch.Tensor,
    r: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
    relu: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    acc = r.dtype
    over, along = [0, *range(2, x.ndim)], (-1, *(1 for _ in x.shape[2:]))
    dyf, rf = dy.to(acc), r.view(along)
    xhat = (x.to(acc) - mean.view(along)) * rf
    if relu:
        z = xhat if w is None else xhat * w.to(acc).view(along)
        z = z if b is None else z + b.to(acc).view(along)
        dyf = torch.where(z <= 0, 0.0, dyf)
    db, dw = dyf.sum(over), (dyf * xhat).sum(over)
    dx = dyf * rf if w is None else dyf * rf * w.to(acc).view(along)
    if training:
        n = max(x.numel() // max(x.shape[1], 1), 1)
        scale = rf if w is None else rf * w.to(acc).view(along)
        dx = scale * (dyf - db.view(along) / n - xhat * dw.view(along) / n)
    return dx.to(x.dtype), None if w is None else dw.to(w.dtype), None if b is None else db.to(b.dtype)
