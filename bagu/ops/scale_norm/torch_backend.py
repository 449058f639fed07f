"""ScaleNorm in PyTorch: for CPUs and torch.compile, and as readable formulas."""

import torch

from bagu.ops.contract.signature import accumulator
from bagu.ops.rms_norm.torch_backend import row_norm


def forward(x: torch.Tensor, g: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    acc = accumulator(x.dtype)
    xf = x.to(acc)
    norm = row_norm(xf)  # by vector_norm: its gradient at a zero row is zero; that of sqrt is infinite
    return (xf / norm.clamp(min=eps).unsqueeze(-1) * g.to(acc)).to(x.dtype), norm


def backward(
    dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    acc = norm.dtype
    dyf, xf, length = dy.to(acc), x.to(acc), norm.unsqueeze(-1)
    r = 1 / length.clamp(min=eps)
    along = (dyf * xf).sum(-1, keepdim=True)
    pull = torch.where(length < eps, 0.0, along * r.square())
    dx = g.to(acc) * r * (dyf - xf * pull)
    return dx.to(x.dtype), (along * r).sum().reshape(1).to(g.dtype)
