"""A linear layer in PyTorch. `F.linear` is one node that the compiler, DTensor and FLOP counters know."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from bagu.ops.invariant import in_blocks


def forward(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor]:
    return (F.linear(x, w, bias),)


def backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    rows, features = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    return dy @ w, rows.mT @ features, None if bias is None else rows.sum(0)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, w, bias)
        rows = in_blocks(lambda block: F.linear(block, w, bias), x.reshape(-1, x.shape[-1]))
        return rows.view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return backward(douts[0], *ctx.saved_tensors)


def invariant_forward(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor]:
    return (_Blocks.apply(x, w, bias),)
