"""Other implementations of GeGLU, for the benchmark."""

import torch
import torch.nn.functional as F

from bagu.errors import NotOffered
from bagu.ops.gated import halves


def eager(x: torch.Tensor, up: torch.Tensor | None, approximate: str) -> torch.Tensor:
    gate, up = halves(x, up)
    return F.gelu(gate, approximate=approximate) * up


def liger(x: torch.Tensor, up: torch.Tensor | None, approximate: str) -> torch.Tensor:
    """Liger takes two contiguous tensors, so a packed x is copied first, as in a Liger model."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    if approximate != "tanh":
        raise NotOffered("Liger's gelu is the tanh form only")
    return LigerGELUMulFunction.apply(*halves(x, up))
