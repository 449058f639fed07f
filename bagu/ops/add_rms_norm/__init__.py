"""Residual add and RMSNorm in one. spec.py has the definition and the cost."""

import torch

from bagu.ops.add_rms_norm.spec import SPEC
from bagu.ops.call.dispatch import call


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float = 1e-6, *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, s): the new residual stream s = x + residual in x's dtype, and y = rms_norm(s, w, eps).

    y is computed from the rounded s. Both are differentiable; x and residual have the same gradient.
    """
    return call(SPEC, backend, x=x, residual=residual, w=w, eps=eps)
