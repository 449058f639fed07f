"""The linear layer with adapters by slot in PyTorch: the layer, then `lora_add`, both in the accumulator's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.contract.signature import accumulator
from bagu.ops.lora_add import torch_backend as lora_add


@torch.no_grad()
def forward(
    x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor]:
    acc = accumulator(x.dtype)
    y = F.linear(x.to(acc), w.to(acc), None if bias is None else bias.to(acc))
    lora_add.forward(x=x.to(acc), a=a.to(acc), b=b.to(acc), slots=slots, y=y)
    return (y.to(x.dtype),)
