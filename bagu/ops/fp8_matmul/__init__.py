"""A linear layer of fp8 activations and an fp8 weight. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.fp8_matmul.spec import SPEC


def fp8_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
) -> torch.Tensor:
    """act(x_scale[m] * w_scale[n] * (x @ w.T) + bias) + residual in `dtype`, of e4m3 x[*M, K] and w[N, K].

    `activation` is None, "gelu" (exact), "gelu_tanh", "silu" or "relu". There is no gradient.
    """
    name = str(dtype).removeprefix("torch.")
    return call(
        SPEC, backend, x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, residual=residual, activation=activation,
        dtype=name,
    )  # fmt: skip
