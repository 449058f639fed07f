"""Products with a frozen int8 weight: a quarter of the bytes of fp32, computed in the dtype of the activations (W8A16).

    W = weight * scale        weight [out, in] int8, scale [out] fp32: the largest |W| of a row is 127 steps

The dequantized weight exists during one product only. The backward dequantizes again: autograd would keep the whole
weight of every layer from the forward to the backward.
"""

from typing import Any

import torch

from bagu import ops


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        return ops.matmul(x, ops.dequantize_int8(weight, scale, dtype=x.dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, scale = ctx.saved_tensors
        return ops.matmul(dy, ops.dequantize_int8(weight, scale, dtype=dy.dtype).T), None, None, None


def int8_matmul(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ (weight * scale).T + bias, with a gradient for x alone: weight, scale and bias are frozen."""
    if torch.compiler.is_compiling():  # it traces no op inside a backward, and keeps W of a block until its backward
        return ops.matmul(x, ops.dequantize_int8(weight, scale, dtype=x.dtype, backend="torch"), bias)
    y: torch.Tensor = _Product.apply(x, weight, scale, bias)
    return y
