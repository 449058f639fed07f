"""The activations that products can end with, and their gradients.

gelu is exact, gelu_tanh its approximation by a tanh (GPT-2, Gemma).
"""

import math

import torch
import torch.nn.functional as F

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")


def activate(z: torch.Tensor, activation: str | None) -> torch.Tensor:
    """act(z) in the dtype of z. On a GPU each is one kernel that computes in fp32 and rounds once.

    On a CPU not by F.gelu: its exact form returns NaN for an infinity there.
    """
    if activation == "gelu":
        return F.gelu(z) if z.is_cuda else z * (0.5 + 0.5 * torch.erf(z * math.sqrt(0.5)))
    if activation == "gelu_tanh":
        if z.is_cuda:
            return F.gelu(z, approximate="tanh")
        return z * (0.5 + 0.5 * torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z * z * z)))
    if activation == "silu":
        return F.silu(z) if z.is_cuda else z * torch.sigmoid(z)
    return torch.relu(z) if activation == "relu" else z


def activation_backward(dy: torch.Tensor, z: torch.Tensor, activation: str) -> torch.Tensor:
    """The gradient of z, from that of activate(z) and in its dtype. On a GPU each is one kernel."""
    if activation in ("gelu", "gelu_tanh"):
        return torch.ops.aten.gelu_backward(dy, z, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation == "silu":
        return torch.ops.aten.silu_backward(dy, z)
    return torch.ops.aten.threshold_backward(dy, z, 0)
