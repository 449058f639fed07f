"""SwiGLU. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.swiglu.spec import SPEC


def swiglu(x: torch.Tensor, up: torch.Tensor | None = None, *, backend: str | None = None) -> torch.Tensor:
    """silu(gate) * up. `x` is gate and up packed along the last dim, gate first; or only the gate, if `up` is given."""
    return call(SPEC, backend, x=x, up=up)
