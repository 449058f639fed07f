"""A linear layer: every output feature is a weighted sum of the input features.

    y[m, n] = sum_k x[m, k] * w[n, k] + bias[n]

The sum is accumulated in fp32 (fp64 for fp64) and rounded once, after the bias is added. The weight is [out, in], as in
checkpoints. Dims: M = rows (tokens), K = input features, N = output features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.ops.core import Case, Cost, OpSpec, Rule, Streams
from bagu.ops.matmul import torch_backend


def reference(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The definition. The harness runs it in fp64, and its autograd gives the true gradients.

    It is a matrix product so its fp32 error is that of a GEMM: `sum` adds pairwise and is more exact than any GEMM.
    """
    y = x @ w.mT
    return y if bias is None else y + bias


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, N, K = case.get("lead", (case.get("M", 1),)), case["N"], case["K"]
    x = case.get("offset", 0.0) + case.get("scale", 1.0) * streams.normal("x", *lead, K)
    if "plant" in case.params:
        x[0, K // 2] = case["plant"]
    bias = case.get("shift", 1.0) * streams.normal("bias", N) if case.get("bias", False) else None
    return {"x": x, "w": K**-0.5 * streams.normal("w", N, K), "bias": bias}


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """A product and a sum for each of M N K; x and w are read once and y is written once."""
    M, N, K = dims["M"], dims["N"], dims["K"]
    return Cost(flops=2 * M * N * K, bytes=(M * K + N * K + M * N) * itemsize)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Two GEMMs, dy @ w and dy.T @ x; dy, x and w are read once, dx and dw are written once."""
    M, N, K = dims["M"], dims["N"], dims["K"]
    return Cost(flops=4 * M * N * K, bytes=(2 * M * K + 2 * N * K + M * N) * itemsize)


SPEC = OpSpec(
    name="matmul",
    signature="x[*M, K], w[N, K], bias[N]? -> y[*M, N]",
    reference=reference,
    torch_backend=torch_backend,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("x", "w", "bias"),
    saves=("x", "w", "bias"),
    ulps=1,
    independent=("M", "N"),
    prefer_torch=(
        Rule(
            when="outside invariant mode",
            runs="cuBLAS",
            why="it may choose the order of a sum by the number of rows and so has faster kernels for few rows",
            holds=lambda args: True,
        ),
    ),
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", M=8, N=16, K=32),
        Case("ragged", "no side is a multiple of a block, so every mask is used", M=5, N=23, K=37),
        Case("bias", "the bias joins the sum before it is rounded", M=7, N=24, K=40, bias=True),
        Case("large_bias", "the bias is 100 times the sum, which survives in what is left", M=6, N=20, K=24, bias=True,
             shift=100.0),
        Case("batched", "the leading dims are several, and are folded into rows", lead=(2, 3), N=12, K=40, bias=True),
        Case("single", "there is no leading dim at all: one row, a matrix times a vector", lead=(), N=17, K=24),
        Case("point", "one feature in and one out", M=9, N=1, K=1, bias=True),
        Case("thin", "one input feature: an outer product, with nothing to sum", M=6, N=33, K=1),
        Case("head", "one output feature: the bias's gradient sums many rows", M=300, N=1, K=16, bias=True),
        Case("deep", "a long sum, which 16 bits would lose", M=3, N=5, K=9000),
        Case("offset", "the mean of x is 30 times its spread, so partial sums pass the result", M=4, N=8, K=256,
             offset=30.0),
        Case("loud", "products pass fp16's largest value and the sum comes back below it", M=4, N=9, K=64, scale=2e4),
        Case("nan", "a NaN spoils its own row and no other", M=4, N=9, K=16, plant=float("nan")),
        Case("inf", "an infinity spoils its own row and no other", M=4, N=9, K=16, plant=float("inf")),
        Case("empty", "there is no row, and nothing is launched", M=0, N=9, K=16, bias=True),
        Case("tall", "more rows than the smallest tile has", M=130, N=40, K=32, bias=True),
        Case("tall_odd", "the same, with rows that are not aligned", M=70, N=20, K=20),
        Case("llama_qkv", "the QKV projection of an 8B model at 16k tokens", bench=True, M=16384, N=6144, K=4096),
        Case("llama_up", "its fused gate and up projection", bench=True, M=16384, N=28672, K=4096),
        Case("llama_down", "its down projection: the longest sum", bench=True, M=16384, N=4096, K=14336),
        Case("decode", "one token of 64 requests: the weight's bytes are the time", bench=True, M=64, N=6144, K=4096),
    ],
)  # fmt: skip
