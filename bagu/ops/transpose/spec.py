"""Transpose: exchange two dims of a tensor and make the result contiguous.

    y = x.transpose(dim0, dim1).contiguous()

Any dtype and any two dims; negative dims count from the end; the same dim twice is a copy. The gradient of a float
tensor is transposed back; an integer tensor has none.

Dims: M = the sizes of x, Y = the same with two of them exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.errors import ArgumentError
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims


def reference(x: torch.Tensor, dim0: int, dim1: int) -> torch.Tensor:
    """The definition."""
    return x.transpose(dim0, dim1).clone(memory_format=torch.contiguous_format)


def derive(args: Mapping[str, Any], dims: Dims) -> Dims:
    """The sizes of y, or of x from those of y; raises if dim0 or dim1 is not a dim of x."""
    sizes = list(dims["M"] if "M" in dims else dims["Y"])
    rank = max(len(sizes), 1)  # as in torch, a 0-d tensor takes dims 0 and -1
    for name in ("dim0", "dim1"):
        if not -rank <= dims[name] < rank:
            raise ArgumentError(
                f"transpose: {name} is {dims[name]}, and x has shape {sizes}",
                hint=f"a dim of x is one of {-rank} … {rank - 1}",
            )
    if sizes:
        a, b = dims["dim0"], dims["dim1"]
        sizes[a], sizes[b] = sizes[b], sizes[a]
    return {"Y" if "M" in dims else "M": tuple(sizes)}


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    x = streams.normal("x", *case["shape"])
    if "dtype" in case.params:
        x = streams.integers("x", *case.get("span", (-128, 128)), *case["shape"]).to(case["dtype"])
    if "plant" in case.params:
        x[tuple(0 for _ in case["shape"])], x[tuple(-1 for _ in case["shape"])] = case["plant"]
    dim0, dim1 = case.get("dims", (-2, -1))
    return {"x": x, "dim0": dim0, "dim1": dim1}


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """x is read once and y is written once; there is no arithmetic."""
    return Cost(flops=0, bytes=2 * dims["M"] * itemsize)


nan, inf = float("nan"), float("inf")
SPEC = OpSpec(
    name="transpose",
    signature="x[*M]: any, dim0: int, dim1: int -> y[*Y]",
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost,
    grads=("x",),
    derive=derive,
    ulps=0,
    independent=("M",),
    peers=True,
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the arithmetic of offsets", shape=(16, 32)),
        Case("ragged", "neither side is a multiple of a tile, so every mask is used", shape=(131, 77)),
        Case("batched", "programs go over a dim before the two as well", shape=(3, 37, 41)),
        Case("between", "a dim lies between the two", shape=(5, 3, 35), dims=(0, 2)),
        Case("around", "dims lie before and between the two", shape=(2, 19, 3, 23), dims=(1, 3)),
        Case("heads", "the last dim stays, as between the layouts of attention", shape=(2, 5, 3, 40), dims=(1, 2)),
        Case("outer", "the two are the first and the third of five, with dims between and after",
             shape=(3, 2, 5, 2, 7), dims=(0, 2)),
        Case("cube", "all sides are equal, so that a wrong dim gives a wrong value and no other shape", shape=(5, 5, 5),
             dims=(0, 1)),
        Case("unmerged", "five dims in a row that cannot be merged", shape=(2, 3, 2, 5, 3), dims=(1, 3)),
        Case("many_dims", "with gaps between them, more dims than a kernel takes", shape=(2, 2, 3, 2, 2, 3),
             dims=(1, 4)),
        Case("backwards", "dim0 may come after dim1, and both count from the end", shape=(4, 9, 17), dims=(-1, -3)),
        Case("same", "one dim named twice is a copy", shape=(6, 35), dims=(1, -1)),
        Case("vector", "one dim has nothing to change places with", shape=(77,), dims=(0, 0)),
        Case("scalar", "a tensor without dims takes dim 0, as in torch", shape=(), dims=(0, -1)),
        Case("column", "one side is 1, so the data stays where it is", shape=(97, 1)),
        Case("slim", "one side is far smaller than a tile", shape=(504, 3)),
        Case("square", "one whole tile and a part of three others, aligned on both sides", shape=(144, 160)),
        Case("special", "NaN and infinity are moved like any other value", shape=(9, 11), plant=(nan, inf)),
        Case("empty", "a tensor without elements still has a shape", shape=(3, 0, 5), dims=(0, 1)),
        Case("bytes", "int8 is moved byte by byte", shape=(70, 45), dtype=torch.int8),
        Case("flags", "bool is moved as a byte too", shape=(33, 65), dtype=torch.bool, span=(0, 2)),
        Case("shorts", "int16 is not among the op dtypes of a norm, and is moved all the same",
             shape=(21, 66), dtype=torch.int16),
        Case("longs", "int64 has eight bytes, and the high four matter", shape=(21, 34), dtype=torch.int64,
             span=(-(2**50), 2**50)),
        Case("weight", "a [16384, 4096] matrix: the bar of the speed table", bench=True, shape=(16384, 4096)),
        Case("stack", "eight matrices at once", bench=True, shape=(8, 2048, 4096)),
        Case("attention", "tokens and heads change places and rows of 128 stay whole", bench=True,
             shape=(16, 2048, 32, 128), dims=(1, 2)),
        Case("odd", "the same with odd sides: no aligned rows on either", bench=True, shape=(16383, 4095)),
    ],
)  # fmt: skip
