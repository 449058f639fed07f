"""A linear layer in PyTorch. `F.linear` is one node that the compiler, DTensor and FLOP counters support.

On a CPU without bf16 units, bf16 is widened to fp32 and rounded once, as in the definition: torch's fallback is a
naive loop, 300 times as slow at 512 x 576 x 1536 on a Neoverse-N1, and it prints a C++ stack trace.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from bagu.machine.device import onednn_has_bf16
from bagu.ops import invariant_rows
from bagu.ops.eager import constant, without_autocast
from bagu.ops.invariant import in_blocks

cpu_has_bf16 = constant(onednn_has_bf16)


def widens(x: torch.Tensor) -> bool:
    """Whether products of x are computed in fp32 because the CPU has no products in x's dtype."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not cpu_has_bf16()


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if widens(x):
        return F.linear(x.float(), w.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, w, bias)


def forward(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor]:
    return (linear(x, w, bias),)


def backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    if widens(x):
        wide = backward(dy.float(), x.float(), w.float(), None if bias is None else bias.float())
        return wide[0].to(x.dtype), wide[1].to(x.dtype), None if wide[2] is None else wide[2].to(x.dtype)
    M = x.shape[:-1].numel()
    rows, features = dy.reshape(M, dy.shape[-1]), x.reshape(M, x.shape[-1])
    return dy @ w, rows.mT @ features, None if bias is None else rows.sum(0)


def invariant_rows_of(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x[M, K] wᵀ + bias, each row by itself."""
    if invariant_rows.available(x.dtype):
        return invariant_rows.product(x, w, bias).to(x.dtype)
    return in_blocks(lambda block: linear(block, w, bias), x)


class _Invariant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, w, bias)
        rows = invariant_rows_of(x.reshape(-1, x.shape[-1]), w, bias)
        return rows.view(*x.shape[:-1], w.shape[0])

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return backward(douts[0], *ctx.saved_tensors)


def invariant_forward(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor]:
    return (_Invariant.apply(x, w, bias),)
