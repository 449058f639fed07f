"""A linear layer in which each token may have a LoRA adapter. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.lora_linear.spec import SPEC


def lora_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """x[t] @ w.T + bias + b[slots[t]] @ (a[slots[t]] @ x[t]), of x[T, K], w[N, K], a[L, R, K] and b[L, N, R].

    A row with a slot outside of [0, L), such as -1, has no adapter. An adapter of a lower rank is padded with zeros;
    its scale is part of b. There is no gradient. It is for decoding; for many rows use `matmul` and `lora_add`.
    """
    return call(SPEC, backend, x=x, w=w, a=a, b=b, slots=slots, bias=bias)
