"""RMSNorm. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.rms_norm.spec import SPEC


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6, *, backend: str | None = None) -> torch.Tensor:
    """x / rms(x) * w over the last dim, computed in fp32 and returned in x's dtype."""
    return call(SPEC, backend, x=x, w=w, eps=eps)
