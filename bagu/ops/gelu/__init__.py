"""GELU. What it means and costs is in spec.py."""

from __future__ import annotations

import torch

from bagu.ops.dispatch import call
from bagu.ops.gelu.spec import SPEC


def gelu(x: torch.Tensor, approximate: bool = False, *, backend: str | None = None) -> torch.Tensor:
    """x * Phi(x), in fp32 inside and in x's dtype outside; `approximate` fits Phi with a tanh, as GPT-2 does."""
    return call(SPEC, backend, x=x, approximate=approximate)
