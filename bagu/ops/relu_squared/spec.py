"""The square of a ReLU: an activation that is zero for negative inputs and has a continuous derivative.

    y[m] = max(x[m], 0)^2        dx[m] = 2 max(x[m], 0) dy[m]

Dims: M = elements.   Paper: https://arxiv.org/abs/2109.08668 (Primer)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.ops.contract.core import Case, Cost, OpSpec, Streams


def reference(x: torch.Tensor) -> torch.Tensor:
    """The definition."""
    return torch.relu(x).square()


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    x = case.get("scale", 1.0) * streams.normal("x", *case.get("lead", (case.get("M", 1),)))
    for at, value in enumerate(case.get("plant", ())):
        x[at] = value
    return {"x": x}


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """A comparison and a product; x is read, y is written."""
    return Cost(flops=2 * dims["M"], bytes=2 * dims["M"] * itemsize)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """A comparison and two products; dy and x are read, dx is written."""
    return Cost(flops=3 * dims["M"], bytes=3 * dims["M"] * itemsize)


INF, NAN = float("inf"), float("nan")
SPEC = OpSpec(
    name="relu_squared",
    signature="x[*M] -> y[*M]",
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("x",),
    saves=("x",),
    ulps=1,
    independent=("M",),
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", lead=(8, 64)),
        Case("ragged", "the end fills no block, so the mask is used", lead=(5, 123)),
        Case("single", "there is no dim at all: one number", lead=()),
        Case("empty", "there is no number, and nothing is launched", M=0),
        Case("faint", "squares fall below fp16's smallest normal value", M=200, scale=1e-3),
        Case("loud", "squares pass fp16's largest value, and its infinity is right", M=200, scale=300.0),
        Case(
            "special",
            "zeros of both signs have no slope; NaN stays; inf^2 is inf, and -inf is 0",
            M=40,
            plant=[0.0, -0.0, NAN, INF, -INF],
        ),
        Case("ffn", "the hidden features of an FFN at 16k tokens", bench=True, M=16384 * 8192),
    ],
)
