"""LayerNorm in PyTorch: a formula for tracing and transforms, and PyTorch's fused kernel for eager CPU calls."""

import torch

from bagu.ops.call import eager
from bagu.ops.contract.signature import accumulator

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def formula(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float) -> Triple:
    acc = accumulator(x.dtype)
    xf = x.to(acc)
    mean = xf.mean(-1)
    centred = xf - mean.unsqueeze(-1)
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * rstd.unsqueeze(-1) * w.to(acc)
    return (y if b is None else y + b.to(acc)).to(x.dtype), mean, rstd


def kernel(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float) -> Triple:
    """PyTorch's fused kernel; weight and bias are widened, because otherwise it rounds mean and rstd to 16 bits."""
    acc = accumulator(x.dtype)
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], w.to(acc), None if b is None else b.to(acc), eps)
    return y, mean.squeeze(-1), rstd.squeeze(-1)


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """g = w dy;  h = (x - mean) rstd;  dx = rstd (g - mean_n(g) - h mean_n(g h)). In place on tensors allocated here.

    Not PyTorch's kernel: its dx is inaccurate for a row with a large mean, and its dw is rounded to 16 bits.
    """
    acc, rf, rows = rstd.dtype, rstd.unsqueeze(-1), tuple(range(x.ndim - 1))
    dyf = dy.to(acc)
    h = (x.to(acc) - mean.unsqueeze(-1)).mul_(rf)
    product = dyf * h
    dw = product.sum(rows) if rows else product.clone()
    db = None if b is None else (dyf.sum(rows) if rows else dyf).to(b.dtype)
    g = dyf * w.to(acc)
    pull = torch.mul(g, h, out=product).mean(-1, keepdim=True)
    dx = g.sub_(g.mean(-1, keepdim=True)).addcmul_(h, pull, value=-1).mul_(rf)
    return dx.to(x.dtype), dw.to(w.dtype), db


# 4096 x 256 in bf16 on two cores, forward and backward: 1.6 times as fast as the formula.
forward = eager.node(formula, kernel, backward, residuals=("mean", "rstd"), grads=("x", "w", "b"))
