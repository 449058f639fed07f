"""The linear layer with an 8-bit weight in PyTorch: the weight is widened for each call."""

import torch
import torch.nn.functional as F

from bagu.ops.contract.signature import accumulator


def forward(x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor]:
    acc = torch.promote_types(accumulator(x.dtype), w_scale.dtype)
    z = F.linear(x.to(acc), w.to(acc)) * w_scale.to(acc)
    return ((z if bias is None else z + bias.to(acc)).to(x.dtype),)
