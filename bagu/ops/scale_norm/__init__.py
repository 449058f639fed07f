"""ScaleNorm. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.scale_norm.spec import SPEC


def scale_norm(x: torch.Tensor, g: torch.Tensor, eps: float = 1e-5, *, backend: str | None = None) -> torch.Tensor:
    """g * x / max(||x||, eps) over the last dim, computed in fp32 and returned in x's dtype.

    g is one learned number, as a tensor of shape [1]. A row whose norm is below eps is divided by eps, and its
    norm has no gradient.
    """
    return call(SPEC, backend, x=x, g=g, eps=eps)
