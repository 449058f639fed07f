"""Rotary position embedding. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.rope.spec import SPEC
from bagu.ops.rope.tables import rope_tables

__all__ = ["rope", "rope_tables"]


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    layout: str = "half",
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Rotate the first 2R features of each head of x[*T, H, D] by the angle of its token's position.

    The other features are unchanged. `cos` and `sin` are tables [P, R] (`rope_tables`). `positions` is the table row of
    each token, by default 0, 1, 2, … along the last of the dims T. Positions must be in 0 … P-1. A CPU raises for
    others; a GPU raises only in debug mode (BAGU_DEBUG=1), because the check would synchronize the device.
    `layout` pairs feature r with r + R ("half": Llama, Qwen, GPT-NeoX) or 2r with 2r + 1 ("interleaved": GPT-J).
    """
    return call(SPEC, backend, x=x, cos=cos, sin=sin, positions=positions, layout=layout)
