"""The int8 linear layer in PyTorch: exact sums by float products of pieces of K.

A sum of 1,024 products of int8 is at most 2^24 and so exact in fp32, whose GEMMs are fast everywhere. torch._int_mm
refuses some sizes on CUDA (17 rows at least, multiples of 8).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.activations import activate
from bagu.ops.contract.signature import accumulator
from bagu.ops.int8_matmul.spec import Args

PIECE = 1024


def exact_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The sums over k of x[*M, k] w[N, k] as int32."""
    total = torch.zeros(*x.shape[:-1], w.shape[0], dtype=torch.int32, device=x.device)
    for first in range(0, x.shape[-1], PIECE):
        part = F.linear(x[..., first : first + PIECE].float(), w[:, first : first + PIECE].float())
        total = total + part.to(torch.int32)
    return total


def forward(a: Args) -> tuple[torch.Tensor]:
    to = getattr(torch, a.dtype)
    acc = torch.promote_types(accumulator(to), accumulator(a.x_scale.dtype))
    z = exact_product(a.x, a.w).to(acc) * a.x_scale.to(acc).unsqueeze(-1) * a.w_scale.to(acc)
    return (activate(z if a.bias is None else z + a.bias.to(acc), a.activation).to(to),)
