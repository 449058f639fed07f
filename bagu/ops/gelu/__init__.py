"""GELU. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.gelu.spec import SPEC


def gelu(x: torch.Tensor, approximate: bool = False, *, backend: str | None = None) -> torch.Tensor:
    """x * Phi(x), computed in fp32 and returned in x's dtype; `approximate` replaces Phi by a tanh, as in GPT-2."""
    return call(SPEC, backend, x=x, approximate=approximate)
