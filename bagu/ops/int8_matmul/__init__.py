"""A linear layer of int8 activations and an int8 weight. spec.py has the definition and the cost."""

from typing import Any

import torch

from bagu.ops.call import scope
from bagu.ops.call.dispatch import call
from bagu.ops.dequantize_int8 import dequantize_int8
from bagu.ops.int8_matmul.spec import SPEC
from bagu.ops.quantize_int8 import quantize_int8

__all__ = ["int8_linear", "int8_matmul"]


def int8_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
) -> torch.Tensor:
    """act(x_scale[m] * w_scale[n] * (x @ w.T) + bias) in `dtype`, of int8 x[*M, K] and w[N, K]; the sum is exact.

    `quantize_int8` returns x and x_scale, and w and w_scale. `activation` is None, "gelu", "silu" or "relu". There
    is no gradient: see `int8_linear` for training.
    """
    name = str(dtype).removeprefix("torch.")
    return call(SPEC, backend, x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, activation=activation, dtype=name)


class _StraightThrough(torch.autograd.Function):
    """Rounding to int8 passes the gradient on unchanged: the gradients are those of a product of the rounded values."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, backend: str | None
    ) -> torch.Tensor:
        (xq, x_scale), (wq, w_scale) = quantize_int8(x, backend=backend), quantize_int8(w, backend=backend)
        ctx.save_for_backward(xq, x_scale, wq, w_scale)  # a quarter of the memory of fp32 operands
        ctx.dtypes = w.dtype, None if bias is None else bias.dtype
        ctx.backend = backend if backend is not None else scope.current().backend  # the backward may be outside `use`
        y = int8_matmul(xq, wq, x_scale, w_scale, bias, dtype=x.dtype, backend=backend)
        return y.detach()  # torch.compile of torch 2.11 gives zero gradients to the output of an op that has none

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        xq, x_scale, wq, w_scale = ctx.saved_tensors
        w_dtype, bias_dtype = ctx.dtypes
        dx = dw = dbias = None
        rows = dy.reshape(-1, dy.shape[-1])
        if ctx.needs_input_grad[0]:
            dx = dy @ dequantize_int8(wq, w_scale, dtype=dy.dtype, backend=ctx.backend)
        if ctx.needs_input_grad[1]:
            x = dequantize_int8(xq, x_scale, dtype=dy.dtype, backend=ctx.backend)
            dw = (rows.mT @ x.reshape(-1, x.shape[-1])).to(w_dtype)
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            dbias = rows.sum(0).to(bias_dtype)
        return dx, dw, dbias, None


def int8_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, *, backend: str | None = None
) -> torch.Tensor:
    """x @ w.T + bias by `int8_matmul`: x and w are rounded to int8 with a scale per row in each call (W8A8).

    For training: x, w and bias have gradients as if nothing were rounded before the product (straight-through), taken
    at the rounded values. To serve a frozen weight, quantize it once and call `int8_matmul`.
    """
    y: torch.Tensor = _StraightThrough.apply(x, w, bias, backend)
    return y
