"""The attention block of a transformer. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.self_attention.spec import SPEC


def self_attention(
    x: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    b_in: torch.Tensor | None = None,
    b_out: torch.Tensor | None = None,
    *,
    heads: int,
    causal: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Attention of x[B, S, K] within each sequence, with its projections: w_in[3N, K] makes queries, keys and values,
    w_out[D, N] mixes the heads."""
    return call(SPEC, backend, x=x, w_in=w_in, w_out=w_out, b_in=b_in, b_out=b_out, heads=heads, causal=causal)
