"""A linear layer in PyTorch. `F.linear` is one node that the compiler, DTensor and FLOP counters know.

Where none of them looks, the node is one of our own, with the same products: PyTorch's would make those of a backward
inside torch.autocast in bf16, also where the forward was outside.

bf16 on a CPU without bf16 units is widened to fp32 and rounded once, as the definition says: torch's own fallback is a
naive loop, 300 times as slow at 512 x 576 x 1536 on a Neoverse-N1, and prints a C++ stack trace.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from bagu.machine.device import onednn_has_bf16
from bagu.ops.eager import constant, traced, without_autocast
from bagu.ops.invariant import in_blocks

cpu_has_bf16 = constant(onednn_has_bf16)


def widens(x: torch.Tensor) -> bool:
    """Whether products of x are computed in fp32 because the CPU has none in its dtype."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not cpu_has_bf16()


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if widens(x):
        return F.linear(x.float(), w.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, w, bias)


def forward(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor]:
    if not torch.is_grad_enabled() or traced(x) or traced(w):
        return (linear(x, w, bias),)
    return (_Linear.apply(x, w, bias),)


def backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    return _gradients(dy, x, w, (True, True, bias is not None))


def _gradients(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, needed: tuple[bool, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Those of x, w and the bias that are needed: a frozen weight costs no product."""
    if widens(x):
        wide = _gradients(dy.float(), x.float(), w.float(), needed)
        return tuple(None if d is None else d.to(x.dtype) for d in wide)
    rows, features = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    return (
        dy @ w if needed[0] else None,
        rows.mT @ features if needed[1] else None,
        rows.sum(0) if needed[2] else None,
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return linear(x, w, bias)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gradients(douts[0], *ctx.saved_tensors, ctx.needs_input_grad)


class _Blocks(_Linear):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        rows = in_blocks(lambda block: linear(block, w, bias), x.reshape(-1, x.shape[-1]))
        return rows.view(*x.shape[:-1], w.shape[0])


def invariant_forward(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor]:
    return (_Blocks.apply(x, w, bias),)
