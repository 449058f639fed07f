"""SwiGLU in PyTorch: what runs on a CPU, what the compiler fuses, and the formulas in the open."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.gated import halves, join
from bagu.ops.signature import accumulator


def forward(x: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor]:
    gate, up = halves(x, up)
    acc = accumulator(x.dtype)
    return ((F.silu(gate.to(acc)) * up.to(acc)).to(x.dtype),)


def backward(dy: torch.Tensor, x: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    acc = accumulator(x.dtype)
    dyf, g, u = (t.to(acc) for t in (dy, *halves(x, up)))
    s = torch.sigmoid(g)
    dgate = dyf * u * (s + g * s * torch.sigmoid(-g))  # 1 - s has no digits left near 1
    return join(dgate.to(x.dtype), (dyf * g * s).to(x.dtype), packed=up is None)
