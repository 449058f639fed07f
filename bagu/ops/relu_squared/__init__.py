"""The square of a ReLU. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.relu_squared.spec import SPEC


def relu_squared(x: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """max(x, 0)^2, computed in fp32 and returned in x's dtype."""
    return call(SPEC, backend, x=x)
