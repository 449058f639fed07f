"""A linear layer with a 4-bit weight in PyTorch: the weight is dequantized to fp32 for each call."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.contract.signature import accumulator
from bagu.ops.int4_matmul.layout import dequantize_int4
from bagu.ops.int4_matmul.spec import Args


def forward(a: Args) -> tuple[torch.Tensor]:
    acc = torch.promote_types(accumulator(a.x.dtype), a.scales.dtype)
    w = dequantize_int4(a.packed, a.scales, a.zeros, acc)
    y = F.linear(a.x.to(acc), w, None if a.bias is None else a.bias.to(acc))
    return (y.to(a.x.dtype),)
