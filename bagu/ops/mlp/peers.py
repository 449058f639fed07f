"""Other implementations of the feed-forward block, for the benchmark."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.activations import activate


def eager(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gate: torch.Tensor | None, up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None, activation: str,
) -> torch.Tensor:  # fmt: skip
    u = F.linear(x, up, up_bias)
    h = activate(u, activation) if gate is None else activate(F.linear(x, gate), activation) * u
    return F.linear(h, down, down_bias)
