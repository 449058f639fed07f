"""RMSNorm in PyTorch: a formula for tracing and transforms, and in-place passes for eager CPU calls."""

import torch

from bagu.ops.call import eager
from bagu.ops.contract.signature import accumulator
from bagu.ops.invariant import invariant_rows

BLOCK = 512  # numbers that vector_norm adds sequentially in row_norm


def formula(x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    acc = accumulator(x.dtype)
    xf = x.to(acc)
    r = torch.rsqrt(xf.square().mean(-1) + eps)
    return (xf * r.unsqueeze(-1) * w.to(acc)).to(x.dtype), r


def row_norm(x: torch.Tensor) -> torch.Tensor:
    """The Euclidean norm of each row, as the norm of the norms of its blocks.

    vector_norm reads each number once and writes nothing, but adds sequentially: r would have an error of 42 eps at
    262,144 columns, 7 at 33,333 and 3 at 4,096. In blocks of 512 the error is at most 2 eps, as that of a mean of
    squares, which takes 1.4 to 5 times as long.
    """
    N = x.shape[-1]
    if N <= BLOCK:
        return torch.linalg.vector_norm(x, dim=-1)
    whole = N - N % BLOCK
    norms = torch.linalg.vector_norm(x[..., :whole].unflatten(-1, (-1, BLOCK)), dim=-1)
    if whole < N:
        norms = torch.cat([norms, torch.linalg.vector_norm(x[..., whole:], dim=-1, keepdim=True)], -1)
    return row_norm(norms)


def passes(x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in few passes: widen, reduce, scale, scale in place, narrow."""
    acc = accumulator(x.dtype)
    xf = x.to(acc)
    r = row_norm(xf).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (xf * r.unsqueeze(-1)).mul_(w.to(acc)).to(x.dtype), r


def invariant_passes(x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """By C++ if it computes x's dtype: PyTorch's passes have the same bits in any batch too, but not those of a program
    (invariant_rows.Program)."""
    return invariant_rows.norm(x, w, eps) if invariant_rows.available(x.dtype) else passes(x, w, eps)


def backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """g = w dy;  dx = r (g - x r^2 mean_n(g x));  dw = sum_m r dy x. In place on tensors allocated here."""
    acc, N, rows = r.dtype, x.shape[-1], r.unsqueeze(-1)
    dyf, xf = dy.to(acc), x.to(acc)
    product = dyf * xf
    dw = r.reshape(-1) @ product.reshape(r.numel(), N)
    g = dyf * w.to(acc)
    pull = torch.mul(g, xf, out=product).mean(-1, keepdim=True).mul_(rows.square())
    dx = g.addcmul_(xf, pull, value=-1).mul_(rows)
    return dx.to(x.dtype), dw.to(w.dtype)


# 4096 x 256 in bf16 on two cores, forward and backward: 1.6 times as fast as the formula.
forward = eager.node(formula, passes, backward, residuals=("r",), grads=("x", "w"))
invariant_forward = eager.node(formula, invariant_passes, backward, residuals=("r",), grads=("x", "w"))
