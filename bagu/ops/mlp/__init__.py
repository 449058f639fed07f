"""The feed-forward block of a transformer. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.mlp.spec import SPEC


def mlp(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str,
    backend: str | None = None,
) -> torch.Tensor:
    """act(x upᵀ + up_bias) downᵀ + down_bias of x[*M, K], up[N, K] and down[D, N]; with gate[N, K] the first factor is
    act(x gateᵀ) * (x upᵀ + up_bias). `activation` is "silu", "gelu" (exact), "gelu_tanh" or "relu"."""
    return call(
        SPEC, backend, x=x, up=up, down=down, gate=gate, up_bias=up_bias, down_bias=down_bias, activation=activation
    )
