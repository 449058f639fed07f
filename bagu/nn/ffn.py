"""The feed-forward network of a block: up, activation, down. With a gate, one weight computes gate and up, gate
first."""

from typing import Unpack

import torch
from torch import nn

from bagu import ops
from bagu.nn.config import FFNKind, GateClamp, ModelConfig
from bagu.nn.linear import Factory, Linear
from bagu.ops.invariant.mode import sigmoid


def activate(kind: FFNKind, x: torch.Tensor, clamp: GateClamp | None = None) -> torch.Tensor:
    """Map x[T, F], or x[T, 2F] with the gate first, to [T, F]."""
    if clamp is not None:
        return clamped_swiglu(x, clamp)
    match kind:
        case "swiglu":
            return ops.swiglu(x)
        case "geglu":
            return ops.geglu(x, approximate="none")
        case "geglu_tanh":
            return ops.geglu(x, approximate="tanh")
        case "gelu":
            return ops.gelu(x)
        case "gelu_tanh":
            return ops.gelu(x, approximate=True)
        case "gelu_quick":  # CLIP
            return x * sigmoid(1.702 * x)
        case "relu2":
            return ops.relu_squared(x)


def clamped_swiglu(x: torch.Tensor, clamp: GateClamp) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1), computed in fp32 and rounded once."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (gate * sigmoid(clamp.alpha * gate) * (up + 1.0)).to(x.dtype)


class FFN(nn.Module):
    def __init__(self, config: ModelConfig, intermediate_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.kind, self.clamp = config.ffn, config.gate_clamp
        D, F, bias, wn = config.hidden_size, intermediate_size, config.ffn_bias, config.weight_norm
        if config.gated:
            self.gate_up = Linear(D, 2 * F, bias=bias, weight_norm=wn, **factory)
        else:
            self.up = Linear(D, F, bias=bias, weight_norm=wn, **factory)
        self.down = Linear(F, D, bias=bias, weight_norm=wn, **factory)
        self.gated = config.gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.gate_up(x) if self.gated else self.up(x)
        y: torch.Tensor = self.down(activate(self.kind, h, self.clamp))
        return y
