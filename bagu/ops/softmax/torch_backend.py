"""Softmax in PyTorch: for CPUs and torch.compile, and as readable formulas."""

import torch

from bagu.ops.contract.signature import accumulator


def allowed(x: torch.Tensor, mask: torch.Tensor | None, lengths: torch.Tensor | None) -> torch.Tensor | None:
    """The mask of visible columns, or None if all are visible."""
    if lengths is None:
        return mask
    within = x.new_ones(x.shape[-1], dtype=torch.int64).cumsum(0) <= lengths.unsqueeze(-1)  # DTensor in, DTensor out
    return within if mask is None else mask & within


def forward(
    x: torch.Tensor, scale: float, mask: torch.Tensor | None, lengths: torch.Tensor | None
) -> tuple[torch.Tensor]:
    z = x.to(accumulator(x.dtype))
    z = z if scale == 1 else z * scale
    keep = allowed(x, mask, lengths)
    if keep is None:
        return (torch.softmax(z, -1).to(x.dtype),)
    y = torch.softmax(torch.where(keep, z, -torch.inf), -1)
    return (torch.where(keep, y, 0.0).to(x.dtype),)


def backward(dy: torch.Tensor, y: torch.Tensor, scale: float) -> tuple[torch.Tensor]:
    acc = accumulator(y.dtype)
    yf, seen = y.to(acc), y != 0
    dyf = torch.where(seen, dy.to(acc), 0.0)
    # y is rounded, so a row sums to 1 only approximately. Dividing by that sum keeps the mean exact where one y is
    # almost 1 and dy - mean almost cancels; without it, bf16 gradients of such rows are wrong in the first digit.
    mean = (dyf * yf).sum(-1, keepdim=True) / yf.sum(-1, keepdim=True)
    return (torch.where(seen, scale * yf * (dyf - mean), 0.0).to(y.dtype),)
