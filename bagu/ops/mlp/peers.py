"""Other implementations of the feed-forward block, for the benchmark."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.activations import activate
from bagu.ops.mlp.spec import Args


def eager(a: Args) -> torch.Tensor:
    u = F.linear(a.x, a.up, a.up_bias)
    h = activate(u, a.activation) if a.gate is None else activate(F.linear(a.x, a.gate), a.activation) * u
    return F.linear(h, a.down, a.down_bias)
