"""A linear layer with an 8-bit weight. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.w8a16_matmul.spec import SPEC


def w8a16_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """w_scale[n] * (x @ w.T) + bias in the dtype of x, of int8 or e4m3 w[N, K]; the sum is in fp32. No gradient."""
    return call(SPEC, backend, x=x, w=w, w_scale=w_scale, bias=bias)
