"""LayerNorm. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.layer_norm.spec import SPEC


def layer_norm(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, eps: float = 1e-5, *, backend: str | None = None
) -> torch.Tensor:
    """(x - mean) / std * w + b over the last dim, computed in fp32 and returned in x's dtype.

    The variance is the mean of squared deviations (divided by N, not N - 1), and eps is added to it.
    """
    return call(SPEC, backend, x=x, w=w, b=b, eps=eps)
