"""RMSNorm: normalise each row to unit root-mean-square, then scale each feature by a learned weight.

    y[m, n] = x[m, n] * r[m] * w[n]        r[m] = 1 / sqrt(mean_n x[m, n]^2 + eps)

Dims: M = rows (tokens), N = features.   Paper: https://arxiv.org/abs/1910.07467
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.ops.contract.cases import ROW_CASES
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams


def reference(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """The definition. The harness runs it in fp64, and its autograd gives the true gradients."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, N = case.get("lead", (case.get("M", 1),)), case["N"]
    x = case.get("scale", 1.0) * streams.normal("x", *lead, N)
    if "plant" in case.params:
        x[0, N // 2] = case["plant"]
    eps = case.get("eps", streams.choice("eps", 1e-6, 0.02, 0.7))
    return {"x": x, "w": 1 + 0.1 * streams.normal("w", N), "eps": eps}


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Square, add, scale, scale per element; x is read once and y is written once."""
    M, N = dims["M"], dims["N"]
    return Cost(flops=4 * M * N, bytes=(2 * M * N + N) * itemsize + 4 * M)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """dy and x are read once, dx is written once; dw is a sum over rows."""
    M, N = dims["M"], dims["N"]
    return Cost(flops=9 * M * N, bytes=(3 * M * N + 2 * N) * itemsize + 4 * M)


SPEC = OpSpec(
    name="rms_norm",
    signature="x[*M, N], w[N]: float, eps: float -> y[*M, N]; r[*M]: acc",
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("x", "w"),
    saves=("x", "w", "r"),
    ulps=1,
    independent=("M",),
    peers=True,
    cases=[
        *ROW_CASES,
        Case("alone", "a row fills a program by itself", M=3, N=5000),
        Case("crowd", "more programs share the weight's gradient than one block adds up", M=260, N=520, sms=80),
        Case("narrow", "rows are short and many, so one program owns several of them", M=67, N=2),
        Case("point", "N = 1 makes dx cancel almost to zero", M=64, N=1),
        Case("faint", "x^2 is near eps, so a kernel that drops eps shows it", M=4, N=52, scale=1e-3, eps=1e-6),
        Case("loud", "x^2 is past fp16's largest value, so squaring must happen in fp32", M=4, N=50, scale=1e3),
        Case("zero", "the row is all zeros and only eps keeps it finite", M=3, N=16, scale=0.0),
        Case("mixed", "the weight stays fp32 beside 16-bit activations, as master weights do", M=6, N=70, mixed=["w"]),
        Case("nan", "a NaN spoils its own row of y and dx and no other", M=3, N=33, plant=float("nan")),
        Case("inf", "an infinity gives 0 * inf = NaN in its place and zeros beside it", M=3, N=33, plant=float("inf")),
        Case("unaligned", "rows start at every alignment, so no load is wider than a value", M=19, N=1031),
        Case(
            "eights", "rows begin on 16 bytes, but N is no multiple of 16, which is what Triton asks for", M=3, N=1032
        ),
        Case("tail", "a row in two blocks, 1,024 features and 144", M=7, N=1168),
        Case("long", "the backward reads rows twice, the second time split over programs", M=6, N=12000, eps=0.3),
        Case("wide", "the row does not fit in registers, so it is read twice, in blocks", M=3, N=33333, eps=0.3),
        Case("wide_faint", "x^2 is near eps in a row that is read twice", M=1, N=33001, scale=1e-3, eps=1e-6),
        Case("llama_8b", "the hidden size of an 8B model at 16k tokens", bench=True, M=16384, N=4096),
        Case("qwen_32b", "a 5120-wide row is no power of two", bench=True, M=16384, N=5120),
        Case("odd", "an odd N has no aligned rows", bench=True, M=16384, N=4095),
        Case("past", "an odd N one past a power of two: a block would be half empty", bench=True, M=16384, N=4097),
        Case("past_8k", "one past 8,192, where a block twice as long spills", bench=True, M=16384, N=8193),
        Case("very_wide", "one row does not fit a program's registers", bench=True, M=1024, N=131072),
    ],
)
