"""Add the LoRA adapter of each token to the output of a linear layer. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.lora_add.spec import SPEC


def lora_add(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """y[t] += b[slots[t]] @ (a[slots[t]] @ x[t]), in place, of x[T, K], y[T, N], a[L, R, K] and b[L, N, R].

    A row with a slot outside of [0, L), such as -1, has no adapter and is not changed. An adapter of a lower rank is
    padded with zeros; its scale is part of b. There is no gradient.
    """
    call(SPEC, backend, x=x, a=a, b=b, slots=slots, y=y)
