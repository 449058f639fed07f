"""GeGLU: a gated linear unit whose gate is a GELU.

    y[m, n] = gelu(gate[m, n]) * up[m, n]

    approximate = "none":   gelu(g) = g * Phi(g) = g / 2 * (1 + erf(g / sqrt(2)))
    approximate = "tanh":   gelu(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)))

x is gate and up packed along the last dim, gate first; or only gate, with up as the second tensor.
Dims: M = rows (tokens), N = features, K = 2N if packed, N if separate.
Papers: https://arxiv.org/abs/2002.05202 (GeGLU), https://arxiv.org/abs/1606.08415 (GELU)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from bagu.errors import UnknownName
from bagu.ops import gated
from bagu.ops.contract.core import Case, OpSpec, Streams
from bagu.ops.contract.signature import Dims


def reference(x: torch.Tensor, up: torch.Tensor | None, approximate: str) -> torch.Tensor:
    """The definition."""
    gate, up = gated.halves(x, up)
    if approximate == "none":
        return gate / 2 * (1 + torch.erf(gate / math.sqrt(2))) * up
    return gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    return gated.inputs(case, streams) | {
        "approximate": case.get("approximate", streams.choice("approximate", "tanh", "none"))
    }


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    if args["approximate"] not in ("tanh", "none"):
        raise UnknownName.among("approximation of gelu", args["approximate"], ("tanh", "none"))


EXACT = [
    Case("exact", "the exact gelu, packed", M=7, N=50, approximate="none"),
    Case("exact_separate", "the exact gelu, gate and up separate", M=4, N=21, approximate="none", separate=True),
    Case("exact_loud", "erf is flat and exp(-gate^2 / 2) is zero", M=4, N=48, scale=1e3, approximate="none"),
    Case("exact_mid", "near |gate| = 2 exact and tanh differ most, by 5e-4", M=8, N=64, scale=2, approximate="none"),
    Case(
        "exact_inf",
        "inf * 0 = NaN in dgate, and -inf * 0 = NaN in y",
        M=3,
        N=20,
        plant=[gated.INF, -gated.INF],
        approximate="none",
    ),
    Case("exact_packed", "erf is the dearest of the three steps", bench=True, M=16384, N=8192, approximate="none"),
]

SPEC = OpSpec(
    name="geglu",
    signature="x[*M, K], up[*M, K]?, approximate: str -> y[*M, N]",
    reference=reference,
    inputs=inputs,
    cost=gated.cost,
    cost_backward=gated.cost_backward,
    grads=("x", "up"),
    saves=("x", "up"),
    derive=partial(gated.width, "geglu"),
    refuse=refuse,
    ulps=2,  # autograd computes the torch backend's slope as s * (1 - s), and 1 - s has few digits near 1
    independent=("M",),
    peers=True,
    cases=[*gated.CASES, *EXACT],
)
