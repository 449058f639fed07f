"""int8 dequantization: the inverse of `quantize_int8`.

    y = q * scale        scale [1], [*M] or [N] for granularity "tensor", "row" or "channel"

`dtype` is the dtype of y: float16, bfloat16, float32 or float64. There are no gradients.
Dims: M = rows, N = columns, S = the shape of scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.errors import ArgumentError, UnknownName
from bagu.ops.contract.cases import ROW_CASES
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.quantize_int8.spec import scale_shape

DTYPES = ("float16", "bfloat16", "float32", "float64")


def reference(q: torch.Tensor, scale: torch.Tensor, granularity: str, dtype: str) -> torch.Tensor:
    """The definition."""
    return q.to(scale.dtype) * (scale.unsqueeze(-1) if granularity == "row" else scale)


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    want = scale_shape(args["granularity"], dims)
    if tuple(dims["S"]) != tuple(want):
        raise ArgumentError(
            f"dequantize_int8: scale has shape {list(dims['S'])}, expected {list(want)} for q of shape "
            f"{[*dims['M'], dims['N']]} by {args['granularity']}",
            hint="pass the granularity that q was quantized with",
        )
    if args["dtype"] not in DTYPES:
        raise UnknownName.among("dtype to dequantize to", args["dtype"], DTYPES)


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, N, by = case.get("lead", (case.get("M", 1),)), case["N"], case.get("by", "row")
    scale = case.get("scale", 0.02) * (0.5 + streams.uniform("scale", *scale_shape(by, {"M": lead, "N": N})))
    if "plant" in case.params:
        scale[-1] = case["plant"]
    q = streams.integers("q", -127, 128, *lead, N).to(torch.int8)
    return {
        "q": q,
        "scale": scale,
        "granularity": by,
        "dtype": case.get("to", streams.choice("dtype", "float32", "float16")),
    }


def cost(dims: Mapping[str, Any], itemsize: int) -> Cost:
    """One product; q is read and y is written."""
    M, N = dims["M"], dims["N"]
    return Cost(flops=M * N, bytes=M * N * (itemsize + getattr(torch, dims["dtype"]).itemsize) + 4 * dims["S"])


BIG: dict[str, Any] = {"M": 16384, "N": 8192, "to": "bfloat16", "bench": True, "mixed": ["scale"]}

SPEC = OpSpec(
    name="dequantize_int8",
    signature="q[*M, N]: i8, scale[*S]: float, granularity: str, dtype: str -> y[*M, N]: given",
    reference=reference,
    inputs=inputs,
    cost=cost,
    refuse=refuse,
    ulps=1,
    independent=("M",),
    peers=True,
    cases=[
        *ROW_CASES,
        Case("narrow", "rows are short and many, so one program owns several of them", M=1500, N=2),
        Case("point", "N = 1: every number has its own scale", M=64, N=1),
        Case("long", "a row is several tiles", M=3, N=5001),
        Case("full", "the last program has all its numbers", M=4, N=640),
        Case("tiles", "a row is two tiles to the last number", M=1, N=8192),
        Case("channel_round", "a program has the end of a row and the start of the next", by="channel", M=5, N=640),
        Case("channel_odd", "many rows that are not aligned", by="channel", M=67, N=523),
        Case("channel_long", "rows that are not aligned, taken as one", by="channel", M=3, N=8197),
        Case("tensor", "one scale is read by every program", by="tensor", M=5, N=33),
        Case("tensor_batched", "one scale over several leading dims", by="tensor", lead=(2, 3), N=40),
        Case("channel", "a scale per column, over several tiles", by="channel", M=37, N=2100),
        Case("channel_batched", "a scale per column under several leading dims", by="channel", lead=(2, 3), N=40),
        Case("channel_square", "as many rows as columns: a scale per row would fit too", by="channel", M=33, N=33),
        Case("half", "16-bit results are rounded once, from fp32", M=6, N=54, to="float16", mixed=["scale"]),
        Case("brain", "bf16 is what a caller gets by default", M=6, N=55, to="bfloat16", mixed=["scale"]),
        Case("double", "an fp64 result of an fp32 scale", M=6, N=50, to="float64", mixed=["scale"]),
        Case("loud", "a product past fp16's largest value is an infinity", M=3, N=16, scale=1e3, to="float16"),
        Case("zero", "the scale of an all-zero group gives zeros", by="tensor", M=3, N=16, plant=0.0),
        Case("nan", "a NaN scale spoils its row and no other", M=3, N=16, plant=float("nan")),
        Case("inf", "an infinite scale makes NaN of zeros", by="channel", M=40, N=16, plant=float("inf")),
        Case("row_8k", "activations of a large feed-forward layer", **BIG),
        Case("tensor_8k", "one scale for the whole tensor", by="tensor", **BIG),
        Case("channel_8k", "a scale per column, read by every tile", by="channel", **BIG),
        Case("row_past", "one past a power of two", **BIG | {"N": 8193}),
        Case("row_odd", "an odd N leaves no row aligned", **BIG | {"N": 8191}),
    ],
)
