"""A linear layer with a 4-bit weight in PyTorch: the weight is dequantized to fp32 for each call."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.contract.signature import accumulator
from bagu.ops.int4_matmul.layout import dequantize_int4


def forward(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor]:
    acc = torch.promote_types(accumulator(x.dtype), scales.dtype)
    w = dequantize_int4(packed, scales, zeros, acc)
    y = F.linear(x.to(acc), w, None if bias is None else bias.to(acc))
    return (y.to(x.dtype),)
