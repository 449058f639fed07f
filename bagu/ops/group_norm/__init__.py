"""GroupNorm. What it means and costs is in spec.py."""

from __future__ import annotations

import torch

from bagu.ops.dispatch import call
from bagu.ops.group_norm.spec import SPEC


def group_norm(
    x: torch.Tensor,
    groups: int,
    w: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """x[B, C, *S] normalised over each of `groups` equal runs of channels (dim 1) with all of S, then times w[C] plus
    b[C] where given; in fp32 inside and in x's dtype outside.
    """
    return call(SPEC, backend, x=x, w=w, b=b, groups=groups, eps=eps)
