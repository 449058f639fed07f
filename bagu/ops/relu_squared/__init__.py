"""The square of a ReLU. What it means and costs is in spec.py."""

from __future__ import annotations

import torch

from bagu.ops.dispatch import call
from bagu.ops.relu_squared.spec import SPEC


def relu_squared(x: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """max(x, 0)^2, in fp32 inside and in x's dtype outside."""
    return call(SPEC, backend, x=x)
