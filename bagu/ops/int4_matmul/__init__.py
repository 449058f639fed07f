"""A linear layer with a 4-bit weight. spec.py has the definition and the cost, layout.py the rounding of a weight."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.int4_matmul.layout import Int4, dequantize_int4, quantize_int4
from bagu.ops.int4_matmul.spec import SPEC

__all__ = ["Int4", "dequantize_int4", "int4_matmul", "quantize_int4"]


def int4_matmul(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """x @ W.T + bias with W[n, k] = (value - zeros[n, k // 128]) * scales[n, k // 128]; zeros None: 8 everywhere.

    `packed` has two 4-bit values per byte (uint8 [N, K / 2]), as `quantize_int4` returns them: byte j of a group has
    its columns j and j + 64. The sum is in fp32. No gradient.
    """
    return call(SPEC, backend, x=x, packed=packed, scales=scales, zeros=zeros, bias=bias)
