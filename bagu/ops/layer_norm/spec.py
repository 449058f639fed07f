"""LayerNorm: normalise each row to zero mean and unit variance, then scale and shift each feature.

    y[m, n] = (x[m, n] - mean[m]) * rstd[m] * w[n] + b[n]
    mean[m] = mean_n x[m, n]        rstd[m] = 1 / sqrt(mean_n (x[m, n] - mean[m])^2 + eps)

Dims: M = rows (tokens), N = features.   Paper: https://arxiv.org/abs/1607.06450
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.ops.contract.cases import ROW_CASES
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams


def reference(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The definition. The harness runs it in fp64, and its autograd gives the true gradients."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * w
    return y if b is None else y + b


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, N = case.get("lead", (case.get("M", 1),)), case["N"]
    x = case.get("offset", 0.0) + case.get("scale", 1.0) * streams.normal("x", *lead, N)
    if "plant" in case.params:
        x[0, N // 2] = case["plant"]
    b = 0.5 * streams.normal("b", N) if case.get("bias", True) else None
    eps = case.get("eps", streams.choice("eps", 1e-5, 0.02, 0.7))
    return {"x": x, "w": 1 + 0.1 * streams.normal("w", N), "b": b, "eps": eps}


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Sum, subtract, square, add, scale, scale, shift per element; x is read once and y is written once."""
    M, N = dims["M"], dims["N"]
    return Cost(flops=7 * M * N, bytes=(2 * M * N + 2 * N) * itemsize + 2 * 4 * M)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """dy and x are read once, dx is written once; dw and db are sums over rows."""
    M, N = dims["M"], dims["N"]
    return Cost(flops=14 * M * N, bytes=(3 * M * N + 3 * N) * itemsize + 2 * 4 * M)


SPEC = OpSpec(
    name="layer_norm",
    signature="x[*M, N], w[N]: float, b[N]?: float, eps: float -> y[*M, N]; mean[*M]: acc, rstd[*M]: acc",
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("x", "w", "b"),
    saves=("x", "w", "b", "mean", "rstd"),
    ulps=1,
    independent=("M",),
    peers=True,
    cases=[
        *ROW_CASES,
        Case("no_bias", "the bias is absent, and so is its gradient", M=5, N=100, bias=False),
        Case("empty_no_bias", "there is no row and no bias", M=0, N=24, bias=False),
        Case("alone", "a row fills a program by itself", M=3, N=5000),
        Case("whole", "rows fill their block, and are enough for programs to own several", M=34, N=2048),
        Case("narrow", "rows are short and many, so one program owns several of them", M=67, N=3),
        Case("point", "N = 1 has no spread: y is the bias and dx is zero", M=64, N=1),
        Case("offset", "E[x^2] - E[x]^2 loses the spread of 1 beside a mean of 1,000", M=6, N=200, offset=1e3),
        Case("faint", "the variance is near eps, so a kernel that drops eps shows it", M=4, N=53, scale=1e-3, eps=1e-5),
        Case("loud", "x^2 is past fp16's largest value, so squaring must happen in fp32", M=4, N=50, scale=1e3),
        Case("flat", "the row is constant and only eps keeps it finite", M=3, N=16, offset=3.0, scale=0.0),
        Case("mixed", "weight and bias stay fp32 beside 16-bit activations", M=6, N=70, mixed=["w", "b"]),
        Case("mixed_w", "only the weight is fp32: its gradient and the bias's differ in dtype", M=6, N=72, mixed=["w"]),
        Case("nan", "a NaN spoils its own row of y and dx and no other", M=3, N=33, plant=float("nan")),
        Case("inf", "an infinite mean makes its whole row NaN and no other", M=3, N=33, plant=float("inf")),
        Case("unaligned", "rows start at every alignment, so no load is wider than a value", M=19, N=1031),
        Case("tail", "a row in two blocks, 1,024 features and 144", M=7, N=1168),
        Case("hollow", "a long row fills most of its block, not all", M=3, N=1800),
        Case(
            "wide",
            "the row is read twice, in blocks, and there too its spread survives a large mean",
            M=6,
            N=16496,
            offset=1e3,
            eps=0.3,
        ),
        Case(
            "wide_no_bias",
            "rows that are read twice start at every alignment, without a bias",
            M=3,
            N=16503,
            eps=0.3,
            bias=False,
        ),
        Case("gpt3_6_7b", "the hidden size of GPT-3 6.7B at 16k tokens", bench=True, M=16384, N=4096),
        Case("opt_66b", "twice the width: a row takes half a multiprocessor's registers", bench=True, M=16384, N=8192),
        Case("opt_13b", "a 5120-wide row is no power of two", bench=True, M=16384, N=5120),
        Case("odd", "an odd N has no aligned rows", bench=True, M=16384, N=4095),
        Case("past", "an odd N one past a power of two: a block would be half empty", bench=True, M=16384, N=4097),
        Case("past_8k", "one past 8,192, where a block twice as long spills", bench=True, M=16384, N=8193),
        Case("wide_odd", "one past 65,536, where one row per program spills", bench=True, M=2048, N=65537),
        Case("very_wide", "one row does not fit a program's registers", bench=True, M=1024, N=131072),
    ],
)
