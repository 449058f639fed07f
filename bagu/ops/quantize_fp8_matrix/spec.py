"""Quantization of a matrix to fp8 (e4m3 or e5m2) with one scale, in both layouts.

    scale = max |x| / largest        q = x / scale, rounded to `dtype`, ties to even        t = qᵀ

largest is 448 for float8_e4m3fn and 57344 for float8_e5m2. An fp8 product reads both operands along the summed dim, and
the three products of a linear layer sum over each of its dims, so a matrix is needed with either dim last in memory.
max |x| is the largest of `amax[P]` if that is given: it must not be less than the largest |x|.

A matrix of zeros, tiny scales, NaN and infinities are as in `quantize_int8`: one invalid number makes the scale
invalid and q = 0, so that every product with q * scale is NaN. There are no gradients.
Dims: M = rows, K = columns, P = parts of x whose largest |x| is known.
Paper: https://arxiv.org/abs/2209.05433 (FP8 formats for deep learning)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.errors import ArgumentError, UnknownName
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.quantize_fp8.spec import unsupported

DTYPES = ("float8_e4m3fn", "float8_e5m2")
MOST_PARTS = 4096  # every program of the kernel reads all of `amax`


def reference(
    x: torch.Tensor, amax: torch.Tensor | None, dtype: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The definition, without the rounding to fp8."""
    top = (x.abs() if amax is None else amax).amax() if x.numel() else x.new_zeros(())
    scale = top / torch.finfo(getattr(torch, dtype)).max
    scale = torch.where(scale < 2.0**-126, 0.0, scale)
    q = torch.where((scale > 0) & scale.isfinite(), x / scale, 0.0)
    return q, q.mT, scale


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    if args["dtype"] not in DTYPES:
        raise UnknownName.among("dtype of quantize_fp8_matrix", args["dtype"], DTYPES)
    if args["amax"] is not None and not 1 <= dims["P"] <= MOST_PARTS:
        raise ArgumentError(
            f"quantize_fp8_matrix: amax has {dims['P']} numbers, expected 1 to {MOST_PARTS}",
            hint="pass amax.amax()[None]",
        )


def check_values(args: Mapping[str, Any], dims: Dims) -> None:
    """`amax` is an upper bound: a number above it would have no fp8 value."""
    if args["amax"] is not None and bool(args["amax"].amax() < args["x"].abs().amax()):
        raise ArgumentError("quantize_fp8_matrix: x has a number larger than every number of amax")


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    M, K = case["M"], case["K"]
    x = case.get("scale", 1.0) * streams.normal("x", M, K)
    if "peak" in case.params:
        x[-1, -1] = case["peak"]
    if "plant" in case.params:
        x[1, K // 2] = case["plant"]
    parts = case.get("parts", None)
    amax = None if parts is None else torch.cat([x.abs().amax()[None], streams.uniform("amax", parts - 1)]).flip(0)
    return {"x": x, "amax": amax, "dtype": case.get("to", streams.choice("dtype", *DTYPES))}


def cost(dims: Mapping[str, Any], itemsize: int) -> Cost:
    """Abs, max, product, round; q and t are written. The scale needs all of x before the first q, so an x larger than
    any cache is read twice unless `amax` is given."""
    M, K = dims["M"], dims["K"]
    reads = 1 if "P" in dims else 2
    return Cost(flops=4 * M * K, bytes=M * K * (reads * itemsize + 2) + 4)


NAN, INF = float("nan"), float("inf")
SPEC = OpSpec(
    name="quantize_fp8_matrix",
    signature="x[M, K], amax[P]?: acc, dtype: str -> q[M, K]: given, t[K, M]: given, scale[]: acc",
    reference=reference,
    inputs=inputs,
    cost=cost,
    refuse=refuse,
    check_values=check_values,
    unsupported=unsupported,
    ulps=0.5,
    ulps_of={"scale": 1},
    independent=(),
    peers=True,
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", M=16, K=32),
        Case("ragged", "no side is a multiple of a tile, and the last number sets the scale", M=131, K=77, peak=-50.0),
        Case("e5m2", "five bits of exponent and two of mantissa", M=33, K=48, to="float8_e5m2", peak=20.0),
        Case("tall", "several tiles and programs along the rows", M=300, K=24, peak=-50.0, to="float8_e4m3fn"),
        Case("wide", "rows longer than a block, and more tiles than programs", M=20, K=2100, sms=1),
        Case("row", "one row: t is a column", M=1, K=40),
        Case("column", "one column: t is a row", M=40, K=1),
        Case("known", "the maxima of parts are given, and the last one is the largest", M=9, K=50, parts=3),
        Case("known_bound", "one number is given for the whole matrix", M=64, K=16, parts=1, to="float8_e5m2"),
        Case("zero", "a matrix of zeros has scale 0 and no 0 / 0", M=3, K=16, scale=0.0),
        Case("tiny", "the scale would be subnormal, where fp32 has few bits left", M=3, K=16, scale=3e-37,
             to="float8_e4m3fn"),
        Case("faint", "numbers near fp16's smallest keep their bits", M=3, K=22, scale=1e-5),
        Case("loud", "numbers near fp16's largest", M=3, K=16, scale=1e4),
        Case("nan", "a NaN spoils the matrix", M=3, K=33, plant=NAN),
        Case("inf", "an infinity spoils the matrix", M=3, K=33, plant=-INF),
        Case("empty", "there is no row, and nothing is launched", M=0, K=16),
        Case("hidden_1b", "the input of a linear layer of a 1B model at 32k tokens", bench=True, M=32768, K=2048,
             to="float8_e4m3fn"),
        Case("gate_up_1b", "the gradient of its gate and up projection", bench=True, M=32768, K=11264,
             to="float8_e4m3fn"),
        Case("down_8b", "the input of the down projection of an 8B model at 16k tokens", bench=True, M=16384, K=14336,
             to="float8_e4m3fn"),
    ],
)  # fmt: skip
