"""A linear layer with an 8-bit weight, int8 or fp8 (e4m3), and a scale per row of w.

    y[m, n] = w_scale[n] * sum_k x[m, k] * w[n, k] + bias[n]

Only the weight is quantized (W8A16): the values of w are exact in 16 bits, the sum is accumulated in fp32 (fp64 for
fp64) and rounded once, after the scale and the bias. It is for decoding: with few rows the weight's bytes are the time,
and rounding x first, as `int8_matmul` and `fp8_matmul` need it, is a second launch. There are no gradients.
Dims: M = rows (tokens), K = input features, N = output features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.errors import ArgumentError
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims

DTYPES = (torch.int8, torch.float8_e4m3fn)


def reference(x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The definition."""
    z = (x @ w.to(x.dtype).mT) * w_scale
    return z if bias is None else z + bias


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    if args["w"].dtype not in DTYPES:
        raise ArgumentError(
            f"w8a16_matmul: w has dtype {args['w'].dtype}, expected int8 or float8_e4m3fn",
            hint="quantize_int8 returns an int8 weight and its scales",
        )


def check_values(args: Mapping[str, Any], dims: Dims) -> None:
    """Scales are finite and not negative."""
    if not bool((args["w_scale"].isfinite() & (args["w_scale"] >= 0)).all()):
        raise ArgumentError(
            "w8a16_matmul: w_scale has values that are NaN, infinite or negative",
            hint="check the tensor that w was quantized from",
        )


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, N, K = case.get("lead", (case.get("M", 1),)), case["N"], case["K"]
    x = streams.normal("x", *lead, K)
    if "plant" in case.params:
        x[0, K // 2] = case["plant"]
    fp8 = case.get("fp8", False)
    w = 64 * streams.normal("w", N, K) if fp8 else streams.integers("w", -128, 128, N, K)
    return {
        "x": x,
        "w": w.to(torch.float8_e4m3fn if fp8 else torch.int8),
        "w_scale": (64 * K**0.5) ** -1 * (0.5 + streams.uniform("w_scale", N)),
        "bias": streams.normal("bias", N) if case.get("bias", False) else None,
    }


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """A product and a sum for each of M N K; x, w and the scales are read once and y is written once."""
    M, N, K = (dims[d] for d in "MNK")
    return Cost(flops=2 * M * N * K, bytes=N * K + (M * K + M * N) * itemsize + 4 * N)


SPEC = OpSpec(
    name="w8a16_matmul",
    signature="x[*M, K], w[N, K]: any, w_scale[N]: float, bias[N]? -> y[*M, N]",
    reference=reference,
    inputs=inputs,
    cost=cost,
    refuse=refuse,
    check_values=check_values,
    ulps=1,
    independent=("M", "N"),
    peers=True,
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", M=8, N=16, K=32),
        Case("ragged", "no side is a multiple of a block, so every mask is used", M=5, N=23, K=37),
        Case("fp8", "a weight of e4m3 instead of int8", M=6, N=32, K=64, fp8=True),
        Case("fp8_ragged", "the same with every mask, and a bias", M=5, N=23, K=37, fp8=True, bias=True),
        Case("bias", "the bias joins the sum before it is rounded", M=7, N=24, K=40, bias=True),
        Case("batched", "the leading dims are several, and are folded into rows", lead=(2, 3), N=12, K=48, bias=True),
        Case("single", "there is no leading dim at all: a matrix times a vector", lead=(), N=17, K=24),
        Case("point", "one feature in and one out", M=9, N=1, K=1, bias=True),
        Case("deep", "a sum of several blocks of K, which 16 bits would lose", M=3, N=5, K=9000),
        Case("mixed", "fp32 scales with activations of 16 bits, as a server has them", M=4, N=9, K=256,
             mixed=["w_scale"]),
        Case("nan", "a NaN spoils its own row and no other", M=4, N=9, K=48, plant=float("nan")),
        Case("inf", "an infinity spoils its own row and no other", M=4, N=9, K=48, plant=float("inf")),
        Case("empty", "there is no row, and nothing is launched", M=0, N=9, K=16, bias=True),
        Case("rows", "several rows without tensor cores, and several blocks of K", M=3, N=17, K=1200, bias=True),
        Case("tile", "few rows in a tile, and several blocks of K", M=12, N=40, K=600, bias=True),
        Case("tall", "more rows than a tile has", M=70, N=40, K=64, bias=True),
        Case("decode_one", "one request: the weight's bytes are the time", bench=True, M=1, N=14336, K=4096,
             mixed=["w_scale"]),
        Case("decode_up", "a token of 16 requests through the up projection of an 8B model", bench=True, M=16, N=14336,
             K=4096, mixed=["w_scale"]),
        Case("decode_down", "the down projection: the longest sum", bench=True, M=16, N=4096, K=14336,
             mixed=["w_scale"]),
        Case("decode_fp8", "the up projection with a weight of e4m3", bench=True, M=16, N=14336, K=4096, fp8=True,
             mixed=["w_scale"]),
        Case("decode_small", "a 0.6B model, where a launch is half of the time", bench=True, M=32, N=1024, K=3072,
             mixed=["w_scale"]),
    ],
)  # fmt: skip
