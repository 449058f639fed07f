"""The linear layer with adapters by slot in PyTorch: the layer, then `lora_add`, both in the accumulator's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.contract.signature import accumulator
from bagu.ops.lora_add import torch_backend as lora_add
from bagu.ops.lora_add.spec import Args as LoraAdd
from bagu.ops.lora_linear.spec import Args


@torch.no_grad()
def forward(args: Args) -> tuple[torch.Tensor]:
    x = args.x
    acc = accumulator(x.dtype)
    y = F.linear(x.to(acc), args.w.to(acc), None if args.bias is None else args.bias.to(acc))
    lora_add.forward(LoraAdd(x.to(acc), args.a.to(acc), args.b.to(acc), args.slots, y))
    return (y.to(x.dtype),)
