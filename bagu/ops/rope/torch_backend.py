"""Rotary position embedding in PyTorch: what runs on a CPU, what the compiler fuses, and the formulas in the open."""

from __future__ import annotations

import torch

from bagu.ops.signature import accumulator


def forward(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None, layout: str
) -> tuple[torch.Tensor]:
    acc, R = accumulator(x.dtype), cos.shape[1]
    T = x.shape[-3] if positions is None else 0
    c, s = ((t[:T] if positions is None else t[positions]).to(acc).unsqueeze(-2) for t in (cos, sin))
    turned, rest = x[..., : 2 * R].to(acc), x[..., 2 * R :]
    if layout == "half":
        a, b = turned[..., :R], turned[..., R:]
        y = torch.cat((a * c - b * s, b * c + a * s), -1)
    else:
        a, b = turned.unflatten(-1, (R, 2)).unbind(-1)
        y = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    return (torch.cat((y.to(x.dtype), rest), -1),)


def backward(
    dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None, layout: str
) -> tuple[torch.Tensor]:
    """The transpose of a rotation is the rotation by the opposite angle."""
    return forward(dy, cos, -sin, positions, layout)
