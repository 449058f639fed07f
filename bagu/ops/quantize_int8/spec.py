"""Quantization to int8: a group of numbers as 8-bit integers and one scale.

    scale = max |x| / 127        q = round(x / scale), ties to even, so that |q| <= 127 and x ≈ q * scale

    granularity = "tensor":    one group, scale [1]
    granularity = "row":       a group per row, scale [*M]
    granularity = "channel":   a group per column, scale [N]

An all-zero group has scale 0 and q = 0. So has a group whose scale would not be a normal fp32 number (below 2^-126). A
group with a NaN has scale NaN; a group with an infinity and no NaN has scale inf. In both q = 0, and `dequantize_int8`
returns NaN for the whole group, so invalid numbers stay visible. There are no gradients.
Dims: M = rows, N = columns, S = the shape of scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.errors import UnknownName
from bagu.ops.contract.cases import ROW_CASES
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims

GRANULARITIES = ("tensor", "row", "channel")
INF, NAN = float("inf"), float("nan")


def scale_shape(granularity: str, dims: Dims) -> tuple[int, ...]:
    if granularity not in GRANULARITIES:
        raise UnknownName.among("granularity", granularity, GRANULARITIES)
    if granularity == "row":
        return dims["M"]
    return (1,) if granularity == "tensor" else (dims["N"],)


def derive(args: Mapping[str, Any], dims: Dims) -> Dims:
    return {"S": scale_shape(args["granularity"], dims)}


def reference(x: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition. q is not rounded, so a backend's q may differ from it by half a step."""
    rows = x.reshape(-1, x.shape[-1])
    dim = {"tensor": (0, 1), "row": (1,), "channel": (0,)}[granularity]
    scale = rows.abs().amax(dim, keepdim=True) / 127
    scale = torch.where(scale < 2.0**-126, 0.0, scale)
    q = torch.where((scale > 0) & scale.isfinite(), rows / scale, 0.0)
    return q.reshape(x.shape), scale.reshape(scale_shape(granularity, {"M": x.shape[:-1], "N": x.shape[-1]}))


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, N = case.get("lead", (case.get("M", 1),)), case["N"]
    x = streams.normal("x", *lead, N) * case.get("scale", 3.0)
    if case.get("zero_row", False):
        x[1] = 0
    if case.get("zero_column", False):
        x[:, 1] = 0
    if "peak" in case.params:
        x[-1, -1] = case["peak"]
    if "plant" in case.params:
        x[1, N // 2] = case["plant"]
    return {"x": x, "granularity": case.get("by", "row")}


def cost(dims: Mapping[str, Any], itemsize: int) -> Cost:
    """Abs, max, product, round; x is read and q is written. A scale that many rows share needs all of x before the
    first q, so an x larger than any cache is read twice.
    """
    reads = 1 if dims["granularity"] == "row" else 2
    M, N = dims["M"], dims["N"]
    return Cost(flops=4 * M * N, bytes=M * N * (reads * itemsize + 1) + 4 * dims["S"])


SPEC = OpSpec(
    name="quantize_int8",
    signature="x[*M, N], granularity: str -> q[*M, N]: i8, scale[*S]: acc",
    reference=reference,
    inputs=inputs,
    cost=cost,
    derive=derive,
    ulps=1,
    independent=("M",),
    peers=True,
    cases=[
        *ROW_CASES,
        Case("narrow", "rows are short and many, so one program owns several of them", M=67, N=2),
        Case("point", "N = 1: every number is its group's largest", M=64, N=1),
        Case("alone", "a row fills a program by itself", M=3, N=5000),
        Case("unaligned", "rows start at every alignment, so no load is wider than a value", M=19, N=1031),
        Case("unaligned_peak", "the largest number is the last, in the tail", M=2, N=523, peak=-50.0),
        Case("unaligned_nan", "a NaN spoils such a row and no other", M=3, N=523, plant=NAN),
        Case("wide", "the row does not fit in registers, so it is read twice, in blocks", M=3, N=33333, peak=-50.0),
        Case(
            "wide_nan", "a NaN in the first block of a long row is still there after the last", M=2, N=33000, plant=NAN
        ),
        Case("tensor", "one scale, set by the very last number, which is negative", by="tensor", M=8, N=64, peak=-50.0),
        Case(
            "tensor_ragged", "one scale over several programs of several tiles", by="tensor", M=112, N=900, peak=-50.0
        ),
        Case("tensor_batched", "one scale over several leading dims", by="tensor", lead=(2, 3), N=40),
        Case("tensor_flat", "one scale over one long row", by="tensor", lead=(), N=80001),
        Case("channel", "the scale of a column is set by its last row", by="channel", M=9, N=50, peak=-50.0),
        Case("channel_tall", "the rows of a column are several programs", by="channel", M=3001, N=5, peak=-50.0),
        Case(
            "channel_wide",
            "columns and rows are several programs of several tiles",
            by="channel",
            M=100,
            N=1500,
            peak=-50.0,
        ),
        Case("channel_single", "one row: every number is its column's largest", by="channel", lead=(), N=24),
        Case("zero_row", "an all-zero row has scale 0 and no 0 / 0", M=3, N=16, zero_row=True),
        Case("zero_column", "an all-zero column has scale 0 and no 0 / 0", by="channel", M=3, N=16, zero_column=True),
        Case("zero", "an all-zero tensor has scale 0 and no 0 / 0", by="tensor", M=3, N=16, scale=0.0),
        Case("tiny", "the scale would be subnormal, where fp32 has few bits left", M=3, N=16, scale=3e-37),
        Case("faint", "numbers near fp16's smallest keep their 8 bits", M=3, N=22, scale=1e-5),
        Case("loud", "numbers near fp16's largest", by="tensor", M=3, N=16, scale=1e4),
        Case("nan", "a NaN spoils its row and no other", M=3, N=33, plant=NAN),
        Case("nan_tensor", "a NaN spoils the tensor", by="tensor", M=3, N=33, plant=NAN),
        Case("nan_channel", "a NaN spoils its column and no other", by="channel", M=3, N=33, plant=NAN),
        Case("inf", "an infinity spoils its row and no other", M=3, N=33, plant=-INF),
        Case("inf_tensor", "an infinity spoils the tensor", by="tensor", M=3, N=33, plant=INF),
        Case("inf_channel", "an infinity spoils its column and no other", by="channel", M=3, N=33, plant=-INF),
        Case("row_8k", "activations of a large feed-forward layer", bench=True, M=16384, N=8192),
        Case("row_odd", "an odd N leaves no row aligned", bench=True, M=16384, N=8191),
        Case("row_past", "an odd N one past a power of two: a block would be half empty", bench=True, M=16384, N=8193),
        Case("row_very_wide", "one row does not fit a program's registers", bench=True, M=1024, N=131072),
        Case("tensor_8k", "one scale for the whole tensor: x is read twice", bench=True, by="tensor", M=16384, N=8192),
        Case("channel_8k", "a scale per column: x is read twice", bench=True, by="channel", M=16384, N=8192),
    ],
)
