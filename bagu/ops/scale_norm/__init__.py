"""ScaleNorm. What it means and costs is in spec.py."""

from __future__ import annotations

import torch

from bagu.ops.dispatch import call
from bagu.ops.scale_norm.spec import SPEC


def scale_norm(x: torch.Tensor, g: torch.Tensor, eps: float = 1e-5, *, backend: str | None = None) -> torch.Tensor:
    """g * x / max(||x||, eps) over the last dim, in fp32 inside and in x's dtype outside.

    g is one learned number, as a tensor of shape [1]. A row shorter than eps is divided by eps, and its
    length has no gradient.
    """
    return call(SPEC, backend, x=x, g=g, eps=eps)
