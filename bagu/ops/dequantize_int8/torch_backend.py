"""int8 dequantization in PyTorch: for CPUs and torch.compile, and as a readable formula."""

import torch

from bagu.ops.contract.signature import accumulator


def forward(q: torch.Tensor, scale: torch.Tensor, granularity: str, dtype: str) -> tuple[torch.Tensor]:
    to = getattr(torch, dtype)
    acc = torch.promote_types(accumulator(to), accumulator(scale.dtype))
    each = scale.unsqueeze(-1) if granularity == "row" else scale
    return ((q.to(acc) * each.to(acc)).to(to),)
