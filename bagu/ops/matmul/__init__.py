"""A linear layer. spec.py has the definition and the cost."""

from __future__ import annotations

import torch

from bagu.ops.dispatch import call
from bagu.ops.matmul.spec import SPEC


def matmul(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, *, backend: str | None = None
) -> torch.Tensor:
    """x @ w.T + bias: `w` is [out, in], as in checkpoints. Accumulated in fp32 and rounded once to x's dtype."""
    return call(SPEC, backend, x=x, w=w, bias=bias)
