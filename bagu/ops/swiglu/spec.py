"""SwiGLU: a gated linear unit whose gate is a SiLU.

    y[m, n] = silu(gate[m, n]) * up[m, n]        silu(g) = g * sigmoid(g)

x is gate and up packed along the last dim, gate first; or only gate, with up as the second tensor.
Dims: M = rows (tokens), N = features, K = 2N if packed, N if separate.   Paper: https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from bagu.ops import gated
from bagu.ops.core import OpSpec, Rule
from bagu.ops.eager import needs_gradient
from bagu.ops.swiglu import torch_backend


def reference(x: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """The definition."""
    gate, up = gated.halves(x, up)
    return gate * torch.sigmoid(gate) * up


def _small_and_trained(args: Mapping[str, Any]) -> bool:
    x, up = args["x"], args["up"]
    return up is not None and x.dtype == torch.bfloat16 and x.numel() <= 2**23 and needs_gradient(args)


SPEC = OpSpec(
    name="swiglu",
    signature="x[*M, K], up[*M, K]? -> y[*M, N]",
    reference=reference,
    torch_backend=torch_backend,
    inputs=gated.inputs,
    cost=gated.cost,
    cost_backward=gated.cost_backward,
    grads=("x", "up"),
    saves=("x", "up"),
    derive=partial(gated.width, "swiglu"),
    ulps=1,
    prefer_torch=(
        Rule(
            when="gate and up are two bf16 tensors of at most 2^23 values, and a gradient is needed",
            runs="silu and a product",
            why="the host limits calls in a row there, and autograd's own nodes take it less time than one in Python",
            holds=_small_and_trained,
        ),
    ),
    independent=("M",),
    peers=True,
    cases=gated.CASES,
)
