"""GeGLU in PyTorch: what runs on a CPU, what the compiler fuses, and the formulas in the open."""

from __future__ import annotations

import math

import torch

from bagu.ops.gated import halves, join
from bagu.ops.signature import accumulator

TWICE = 2 * math.sqrt(2 / math.pi)


def step(g: torch.Tensor, approximate: str) -> torch.Tensor:
    """s(g), where gelu(g) = g * s(g). Not F.gelu: on a CPU its exact form makes NaN of an infinity (torch 2.13)."""
    return 0.5 + 0.5 * torch.erf(g / math.sqrt(2)) if approximate == "none" else torch.sigmoid(twice(g))


def twice(g: torch.Tensor) -> torch.Tensor:
    """2z, where (1 + tanh z) / 2 = sigmoid(2z) is the fit of Phi(g)."""
    return TWICE * g * (1 + 0.044715 * g.square())


def forward(x: torch.Tensor, up: torch.Tensor | None, approximate: str) -> tuple[torch.Tensor]:
    gate, up = halves(x, up)
    acc = accumulator(x.dtype)
    g = gate.to(acc)
    return ((g * step(g, approximate) * up.to(acc)).to(x.dtype),)


def backward(
    dy: torch.Tensor, x: torch.Tensor, up: torch.Tensor | None, approximate: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    acc = accumulator(x.dtype)
    dyf, g, u = (t.to(acc) for t in (dy, *halves(x, up)))
    s = step(g, approximate)
    if approximate == "none":
        slope = torch.exp(-g.square() / 2) / math.sqrt(2 * math.pi)
    else:
        slope = s * torch.sigmoid(-twice(g)) * TWICE * (1 + 3 * 0.044715 * g.square())
    dgate = dyf * u * (s + g * slope)
    return join(dgate.to(x.dtype), (dyf * g * s).to(x.dtype), packed=up is None)
