"""GeGLU. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.geglu.spec import SPEC


def geglu(
    x: torch.Tensor, up: torch.Tensor | None = None, approximate: str = "tanh", *, backend: str | None = None
) -> torch.Tensor:
    """gelu(gate) * up. `x` is gate and up packed along the last dim, gate first; or only the gate, if `up` is given.

    `approximate` is "tanh" (the gelu of Gemma and GPT-2) or "none" (the exact gelu, with erf).
    """
    return call(SPEC, backend, x=x, up=up, approximate=approximate)
