"""GroupNorm. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
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
    """Normalise x[B, C, *S] over each of `groups` equal groups of channels (dim 1) and all of S, then multiply by w[C]
    and add b[C] where given. Computed in fp32 and returned in x's dtype.
    """
    return call(SPEC, backend, x=x, w=w, b=b, groups=groups, eps=eps)
