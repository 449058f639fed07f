"""LoRA adapters by slot in PyTorch: one product with the A of all slots, and one with their B.

A x of other adapters than the token's is set to 0. Nothing is copied to the host.
"""

from __future__ import annotations

import torch

from bagu.ops.contract.signature import accumulator
from bagu.ops.lora_add.spec import Args


@torch.no_grad()
def forward(args: Args) -> tuple[()]:
    acc = accumulator(args.x.dtype)
    own = args.slots.unsqueeze(1) == torch.arange(len(args.a), device=args.x.device)
    low = torch.einsum("tk,lrk->tlr", args.x.to(acc), args.a.to(acc))
    low = torch.where(own.unsqueeze(2), low, 0)
    args.y.copy_(args.y.to(acc) + torch.einsum("tlr,lnr->tn", low, args.b.to(acc)))
    return ()
