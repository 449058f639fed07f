"""Other implementations of SwiGLU, for the benchmark."""

import torch
import torch.nn.functional as F

from bagu.ops.gated import halves


def eager(x: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    gate, up = halves(x, up)
    return F.silu(gate) * up


def liger(x: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """Liger takes two contiguous tensors, so a packed x is copied first, as in a Liger model."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(*halves(x, up))
