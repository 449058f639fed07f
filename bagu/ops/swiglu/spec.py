"""SwiGLU: a gated linear unit whose gate is a SiLU.

    y[m, n] = silu(gate[m, n]) * up[m, n]        silu(g) = g * sigmoid(g)

x is gate and up packed along the last dim, gate first; or only gate, with up as the second tensor.
Dims: M = rows (tokens), N = features, K = 2N if packed, N if separate.   Paper: https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

from functools import partial

import torch

from bagu.ops import gated
from bagu.ops.contract.core import OpSpec


def reference(x: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """The definition."""
    gate, up = gated.halves(x, up)
    return gate * torch.sigmoid(gate) * up


SPEC = OpSpec(
    name="swiglu",
    signature="x[*M, K], up[*M, K]? -> y[*M, N]",
    reference=reference,
    inputs=gated.inputs,
    cost=gated.cost,
    cost_backward=gated.cost_backward,
    grads=("x", "up"),
    saves=("x", "up"),
    derive=partial(gated.width, "swiglu"),
    ulps=1,
    independent=("M",),
    peers=True,
    cases=gated.CASES,
)
