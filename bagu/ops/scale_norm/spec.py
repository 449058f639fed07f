"""ScaleNorm: normalise each row to one learned length; the norm has a single parameter.

    y[m, n] = g * x[m, n] / max(norm[m], eps)        norm[m] = sqrt(sum_n x[m, n]^2)

A row whose norm is below eps is divided by eps: its y is linear in x, and its norm has no gradient.
Dims: M = rows (tokens), N = features.   Paper: https://arxiv.org/abs/1910.05895
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.ops.contract.cases import ROW_CASES
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams


def reference(x: torch.Tensor, g: torch.Tensor, eps: float) -> torch.Tensor:
    """The definition. The harness runs it in fp64, and its autograd gives the true gradients."""
    return x * (g / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=eps))


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, N = case.get("lead", (case.get("M", 1),)), case["N"]
    x = case.get("scale", 1.0) * streams.normal("x", *lead, N)
    if "plant" in case.params:
        x[0, N // 2] = case["plant"]
    g = float(N) ** 0.5 + 0.1 * streams.normal("g", 1)  # the paper initialises it to sqrt(N), so y is about 1
    return {"x": x, "g": g, "eps": case.get("eps", 1e-5)}


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Square, add, scale per element; x is read once and y is written once."""
    M, N = dims["M"], dims["N"]
    return Cost(flops=3 * M * N, bytes=(2 * M * N + 1) * itemsize + 4 * M)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """dy and x are read once, dx is written once; dg is one number."""
    M, N = dims["M"], dims["N"]
    return Cost(flops=5 * M * N, bytes=(3 * M * N + 2) * itemsize + 4 * M)


SPEC = OpSpec(
    name="scale_norm",
    signature="x[*M, N], g[1]: float, eps: float -> y[*M, N]; norm[*M]: acc",
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("x", "g"),
    saves=("x", "g", "norm"),
    ulps=4,  # dg is one sum over every element, with cancellation: fp32 can be 3 off if the reference's error is small
    independent=("M",),
    peers=True,
    cases=[
        *ROW_CASES,
        Case("alone", "a row fills a program by itself", M=3, N=5000),
        Case("narrow", "rows are short and many, so one program owns several of them", M=67, N=2),
        Case("point", "N = 1 leaves the sign of x, and dx cancels to zero", M=64, N=1),
        Case(
            "short",
            "rows are shorter than eps: it divides, and the norm has no gradient",
            M=4,
            N=48,
            scale=1e-2,
            eps=0.5,
        ),
        Case("around", "some rows are shorter than eps and some are not", M=12, N=12, eps=4.0),
        Case("loud", "x^2 is past fp16's largest value, so squaring must happen in fp32", M=4, N=50, scale=1e3),
        Case("zero", "the row is all zeros: y is zero and dx is g * dy / eps", M=3, N=15, scale=0.0, eps=0.5),
        Case("mixed", "g stays fp32 beside 16-bit activations", M=6, N=70, mixed=["g"]),
        Case("nan", "a NaN spoils its own row of y and dx and no other", M=3, N=33, plant=float("nan")),
        Case("inf", "an infinity gives NaN in its place and zeros beside it", M=3, N=33, plant=float("inf")),
        Case("unaligned", "rows start at every alignment, so no load is wider than a value", M=19, N=2053),
        Case("tail", "a row in two blocks, 1,024 features and 144", M=7, N=1168),
        Case("wide", "the row does not fit in registers, so it is read twice, in blocks", M=6, N=33333),
        Case("wide_short", "rows that are read twice are shorter than eps", M=2, N=33333, scale=1e-3, eps=0.5),
        Case("gpt3_6_7b", "the hidden size of GPT-3 6.7B at 16k tokens", bench=True, M=16384, N=4096),
        Case("opt_66b", "twice the width of gpt3_6_7b", bench=True, M=16384, N=8192),
        Case("odd", "an odd N has no aligned rows", bench=True, M=16384, N=4095),
        Case("past", "an odd N one past a power of two: a block would be half empty", bench=True, M=16384, N=4097),
        Case("past_8k", "one past 8,192, where a block twice as long spills", bench=True, M=16384, N=8193),
        Case("wide_odd", "one past 65,536, where one row per program spills", bench=True, M=2048, N=65537),
        Case("very_wide", "one row does not fit a program's registers", bench=True, M=1024, N=131072),
    ],
)
