"""The activations that products can end with: gelu (exact), silu and relu, and their slopes for backwards."""

from __future__ import annotations

import math

import torch

__all__ = ["ACTIVATIONS", "activate", "slope"]

ACTIVATIONS = ("gelu", "silu", "relu")


def activate(z: torch.Tensor, activation: str | None) -> torch.Tensor:
    """act(z), computed in the dtype of z. Not F.gelu: on a CPU its exact form returns NaN for an infinity."""
    if activation == "gelu":
        return z * (0.5 + 0.5 * torch.erf(z * math.sqrt(0.5)))
    if activation == "silu":
        return z * torch.sigmoid(z)
    return torch.relu(z) if activation == "relu" else z


def slope(z: torch.Tensor, activation: str) -> torch.Tensor:
    """The derivative of `activate` at z."""
    if activation == "gelu":
        phi = torch.exp(-0.5 * z.square()) * (2 * math.pi) ** -0.5
        return 0.5 + 0.5 * torch.erf(z * math.sqrt(0.5)) + z * phi
    if activation == "silu":
        s = torch.sigmoid(z)
        return s + z * s * torch.sigmoid(-z)
    return (z > 0).to(z.dtype)
