"""Residual add and RMSNorm: the step between two blocks of a pre-norm transformer, in one pass over memory.

    s[m, n] = x[m, n] + residual[m, n]        in x's dtype: the new residual stream
    y[m, n] = s[m, n] * r[m] * w[n]           r[m] = 1 / sqrt(mean_n s[m, n]^2 + eps)

y is computed from the rounded s that is returned, because the backward has only that s. So y equals
rms_norm(s, w, eps). Dims: M = rows (tokens), N = features.   Paper: https://arxiv.org/abs/1910.07467
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.ops.contract.cases import ROW_CASES
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.rms_norm.spec import reference as rms_norm


def reference(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: the norm of the sum that is returned (in fp64 the rounding of the sum is negligible)."""
    s = x + residual
    return rms_norm(s, w, eps), s


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, N = case.get("lead", (case.get("M", 1),)), case["N"]
    x = case.get("scale", 1.0) * streams.normal("x", *lead, N)
    residual = case.get("scale", 1.0) * case.get("stream", 2.0) * streams.normal("residual", *lead, N)
    if "grid" in case.params:
        x, residual = ((v / case["grid"]).round() * case["grid"] for v in (x, residual))
    if "plant" in case.params:
        (residual if case["into"] == "residual" else x)[0, N // 2] = case["plant"]
    eps = case.get("eps", streams.choice("eps", 1e-6, 0.02, 0.7))
    return {"x": x, "residual": residual, "w": 1 + 0.1 * streams.normal("w", N), "eps": eps}


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Add, square, add, scale, scale per element; x and residual are read once, y and s are written once."""
    M, N = dims["M"], dims["N"]
    return Cost(flops=5 * M * N, bytes=(4 * M * N + N) * itemsize + 4 * M)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """dy, ds and s are read once; x and residual share one gradient, which is written once; dw is a sum over rows."""
    M, N = dims["M"], dims["N"]
    return Cost(flops=10 * M * N, bytes=(4 * M * N + 2 * N) * itemsize + 4 * M)


NAN, INF = float("nan"), float("inf")
SPEC = OpSpec(
    name="add_rms_norm",
    signature="x[*M, N], residual[*M, N], w[N]: float, eps: float -> y[*M, N], s[*M, N]; r[*M]: acc",
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("x", "residual", "w"),
    twins={"residual": "x"},
    saves=("s", "w", "r"),
    ulps=1,
    independent=("M",),
    peers=True,
    cases=[
        *ROW_CASES,
        Case("narrow", "rows are short and many, so one program owns several of them", M=67, N=2),
        Case("point", "N = 1 makes the norm's part of dx cancel, and ds is left", M=64, N=1),
        Case(
            "faint", "s^2 is near eps, so a kernel that drops eps shows it", M=4, N=52, scale=1e-3, stream=0.5, eps=1e-6
        ),
        Case("loud", "s^2 is past fp16's largest value, so squaring must happen in fp32", M=4, N=50, scale=1e3),
        Case("deep", "the stream is 100 times the update, as late in a deep model", M=4, N=53, stream=100.0),
        Case("first", "the stream is empty, and s is x", M=3, N=40, stream=0.0),
        Case("zero", "s is all zeros and only eps keeps it finite", M=3, N=16, scale=0.0),
        # The rounding of s, which the reference does not have, shows in an fp32 dw and in the maximum over thousands of
        # values. With multiples of 1/8 (grid) s is exact.
        Case("mixed", "the weight stays fp32 beside 16-bit activations", M=6, N=70, mixed=["w"], grid=0.125),
        Case("nan", "a NaN of x spoils its own row of y and its own place in s", M=3, N=33, plant=NAN, into="x"),
        Case(
            "inf", "an infinite residual is NaN in its place of y, zeros beside", M=3, N=33, plant=INF, into="residual"
        ),
        Case("unaligned", "rows start at every alignment, so no load is wider than a value", M=19, N=1031),
        Case("tail", "a row in two blocks, 1,024 features and 144", M=7, N=1168),
        Case(
            "long",
            "the backward reads rows twice, the second time split over programs",
            M=6,
            N=12000,
            grid=0.125,
            eps=0.3,
        ),
        Case(
            "wide",
            "s does not fit a program: it is written, then read by other threads",
            M=3,
            N=33003,
            grid=0.125,
            eps=0.3,
        ),
        Case(
            "wide_faint",
            "x^2 is near eps in a row that is read twice",
            M=1,
            N=33000,
            scale=1e-3,
            stream=0.5,
            grid=2**-13,
            eps=1e-6,
        ),
        Case("llama_8b", "the hidden size of an 8B model at 16k tokens", bench=True, M=16384, N=4096),
        Case("llama_70b", "the hidden size of a 70B model", bench=True, M=16384, N=8192),
        Case("qwen_32b", "a 5120-wide row is no power of two", bench=True, M=16384, N=5120),
        Case("odd", "an odd N has no aligned rows", bench=True, M=16384, N=4095),
        Case("wide_odd", "one past 65,536, where one row per program spills", bench=True, M=2048, N=65537),
        Case("very_wide", "one row does not fit a program's registers", bench=True, M=1024, N=131072),
    ],
)
