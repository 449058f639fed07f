"""A linear layer with a fused epilogue. spec.py has the definition and the cost."""

import torch

from bagu.errors import ArgumentError
from bagu.ops.call.dispatch import call
from bagu.ops.fp8_matmul import fp8_matmul
from bagu.ops.matmul.spec import SPEC


def matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    column_scale: torch.Tensor | None = None,
    activation: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """act(row_scale * column_scale * (x @ w.T) + bias) + residual: `w` is [out, in], as in checkpoints.

    row_scale[*M] and column_scale[N] are factors per row of x and per row of w. `activation` is None, "gelu" (exact),
    "gelu_tanh", "silu" or "relu". Accumulated in fp32 and returned in x's dtype. fp8 (e4m3) x and w need both scales,
    have no gradient, and return bf16: see `fp8_matmul`.
    """
    if isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn:
        if row_scale is None or column_scale is None:
            name = "row_scale" if row_scale is None else "column_scale"
            raise ArgumentError(f"matmul: {name} is None, and fp8 operands need a scale per row of x and of w")
        return fp8_matmul(
            x, w, row_scale, column_scale, bias, residual=residual, activation=activation, backend=backend
        )
    return call(
        SPEC,
        backend,
        x=x,
        w=w,
        bias=bias,
        residual=residual,
        row_scale=row_scale,
        column_scale=column_scale,
        activation=activation,
    )
