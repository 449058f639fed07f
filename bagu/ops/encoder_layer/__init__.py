"""A layer of a transformer encoder. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.encoder_layer.spec import SPEC


def encoder_layer(
    x: torch.Tensor, w_in: torch.Tensor, b_in: torch.Tensor, w_out: torch.Tensor, b_out: torch.Tensor,
    up: torch.Tensor, up_bias: torch.Tensor, down: torch.Tensor, down_bias: torch.Tensor, norm1: torch.Tensor,
    norm1_bias: torch.Tensor, norm2: torch.Tensor, norm2_bias: torch.Tensor, *, heads: int, activation: str,
    norm_first: bool = False, eps: float = 1e-5, backend: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Self-attention and a feed-forward block of x[B, S, K], each with a residual and a LayerNorm after it, or before
    it with `norm_first`: `self_attention` and `mlp` have the weights' meaning."""
    return call(
        SPEC, backend, x=x, w_in=w_in, b_in=b_in, w_out=w_out, b_out=b_out, up=up, up_bias=up_bias, down=down,
        down_bias=down_bias, norm1=norm1, norm1_bias=norm1_bias, norm2=norm2, norm2_bias=norm2_bias, heads=heads,
        activation=activation, norm_first=norm_first, eps=eps,
    )  # fmt: skip
