"""LoRA adapters by slot in PyTorch: one product with the A of all slots, and one with their B.

A x of other adapters than the token's is set to 0. Nothing is copied to the host.
"""

from __future__ import annotations

import torch

from bagu.ops.contract.signature import accumulator


@torch.no_grad()
def forward(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, y: torch.Tensor) -> tuple[()]:
    acc = accumulator(x.dtype)
    own = slots.unsqueeze(1) == torch.arange(len(a), device=x.device)
    low = torch.einsum("tk,lrk->tlr", x.to(acc), a.to(acc))
    low = torch.where(own.unsqueeze(2), low, 0)
    y.copy_(y.to(acc) + torch.einsum("tlr,lnr->tn", low, b.to(acc)))
    return ()
