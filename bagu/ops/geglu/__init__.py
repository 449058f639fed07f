"""GeGLU. What it means and costs is in spec.py."""

from __future__ import annotations

import torch

from bagu.ops.dispatch import call
from bagu.ops.geglu.spec import SPEC


def geglu(
    x: torch.Tensor, up: torch.Tensor | None = None, approximate: str = "tanh", *, backend: str | None = None
) -> torch.Tensor:
    """gelu(gate) * up. `x` is gate and up packed along the last dim, gate first; or the gate alone, with `up` given.

    `approximate` is "tanh" (Gemma's and GPT-2's gelu) or "none" (the exact one, with erf).
    """
    return call(SPEC, backend, x=x, up=up, approximate=approximate)
