"""GELU: multiply each number by the probability that a standard normal variable is below it.

    exact:         y = x * Phi(x) = x / 2 * (1 + erf(x / sqrt(2)))                              BERT, ViT
    approximate:   y = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))                    GPT-2, Gemma

On a CPU the exact form gives NaN for +inf, although the limit is +inf: PyTorch's kernel does this (2.13), and a run
with an infinite activation has already failed. Dims: M = elements.   Paper: https://arxiv.org/abs/1606.08415
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from bagu.ops.contract.core import Case, Cost, OpSpec, Streams


def reference(x: torch.Tensor, approximate: bool) -> torch.Tensor:
    """The definition."""
    if approximate:
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + torch.erf(x / math.sqrt(2)))


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    x = case.get("scale", 1.0) * streams.normal("x", *case.get("lead", (case.get("M", 1),)))
    for at, value in enumerate(case.get("plant", ())):
        x[at] = value
    return {"x": x, "approximate": case.get("approximate", False)}


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Scale, erf, add, two products; x is read, y is written."""
    return Cost(flops=5 * dims["M"], bytes=2 * dims["M"] * itemsize)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Phi again, its derivative, two products and a sum; dy and x are read, dx is written."""
    return Cost(flops=10 * dims["M"], bytes=3 * dims["M"] * itemsize)


INF, NAN = float("inf"), float("nan")
SPEC = OpSpec(
    name="gelu",
    signature="x[*M], approximate: bool -> y[*M]",
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("x",),
    saves=("x",),
    ulps=1,
    independent=("M",),
    backends=("torch",),
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", lead=(8, 64)),
        Case("ragged", "the end fills no block, so the mask is used", lead=(5, 123), approximate=True),
        Case("exact_ragged", "the exact form, where the end fills no block", lead=(5, 123)),
        Case("single", "there is no dim at all: one number", lead=()),
        Case("mid", "near |x| = 2 exact and tanh differ most, by 5e-4", lead=(8, 64), scale=2.0),
        Case("mid_tanh", "the same, for the tanh", lead=(8, 64), scale=2.0, approximate=True),
        Case("faint", "a small x stands where Phi is steepest, about 1/2", M=200, scale=1e-3),
        Case("loud", "erf is flat and exp(-x^2 / 2) is zero", M=200, scale=1e3),
        Case(
            "loud_tanh", "x^3 is past fp16's largest value, where the tanh is flat", M=200, scale=1e3, approximate=True
        ),
        Case("nan", "a NaN spoils its own place and no other", M=40, plant=[NAN]),
        Case("inf", "inf passes, -inf * 0 is NaN, and so are both slopes", M=40, plant=[INF, -INF], approximate=True),
        Case("exact", "the hidden features of an FFN at 16k tokens", bench=True, M=16384 * 8192),
        Case("tanh", "the same, for the tanh", bench=True, M=16384 * 8192, approximate=True),
    ],
)
