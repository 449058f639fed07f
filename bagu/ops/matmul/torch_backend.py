"""A linear layer in PyTorch. `F.linear` is one node that the compiler, DTensor and FLOP counters know."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def forward(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor]:
    return (F.linear(x, w, bias),)


def backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    rows, features = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    return dy @ w, rows.mT @ features, None if bias is None else rows.sum(0)
