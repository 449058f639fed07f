"""Convolution of int8 images with an int8 weight: one scale for x and one per output channel.

    y[b, p, q, o] = act(x_scale * w_scale[o] * sum_{r, s, i} x[…] * w[o, r, s, i] + bias[o])        the sum of conv2d

A scale per pixel cannot be taken out of the sum, so x has one scale (`quantize_int8` by "tensor"), and w one per output
channel. The sum is an exact int32 (R S I is below 2^17); scales, bias and activation are computed in fp32 and rounded
once to `dtype`. There are no gradients. Dims as in conv2d.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError, UnknownName
from bagu.ops.activations import activate
from bagu.ops.contract.core import Case, Cost, OpSpec, Rule, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.conv2d import spec as conv2d
from bagu.ops.int8_matmul.spec import DTYPES, LONGEST, past_24_bits


class Args(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    bias: torch.Tensor | None
    stride_h: int
    stride_w: int
    pad_h: int
    pad_w: int
    dilation_h: int
    dilation_w: int
    groups: int
    activation: str | None
    dtype: str


def reference(a: Args) -> torch.Tensor:
    """The definition."""
    steps = (a.stride_h, a.stride_w), (a.pad_h, a.pad_w), (a.dilation_h, a.dilation_w)
    z = conv2d.by_taps(a.x.double(), a.w.double(), *steps, a.groups).to(a.x_scale.dtype) * a.x_scale * a.w_scale
    return activate(z if a.bias is None else z + a.bias, a.activation)


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    if args["dtype"] not in DTYPES:
        raise UnknownName.among("dtype of int8_conv2d", args["dtype"], DTYPES)
    conv2d.refuse_convolution("int8_conv2d", args, dims)
    terms = dims["R"] * dims["S"] * dims["I"]
    if terms > LONGEST:
        raise ArgumentError(
            f"int8_conv2d: a result is a sum of {terms} products, expected at most {LONGEST}: more can overflow int32",
            hint="convolve parts of the channels and add the results",
        )


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    given = conv2d.inputs(case, streams)
    x, w = (streams.integers(name, -127, 128, *given[name].shape) for name in ("x", "w"))
    if case.get("deep", False):
        past_24_bits(x, w)
    return given | {
        "x": x.to(torch.int8),
        "w": w.to(torch.int8),
        "x_scale": 0.02 * (0.5 + streams.uniform("x_scale", 1)),
        "w_scale": (127 * w[0].numel() ** 0.5) ** -1 * (0.5 + streams.uniform("w_scale", w.shape[0])),
        "dtype": case.get("to", streams.choice("dtype", "float32", "float16")),
    }


def cost(dims: Mapping[str, Any], itemsize: int) -> Cost:
    """As of conv2d, with results of another size."""
    found, results = conv2d.cost(dims, itemsize), dims["B"] * dims["P"] * dims["Q"] * dims["O"]
    return Cost(found.flops, found.bytes + results * (getattr(torch, dims["dtype"]).itemsize - itemsize))


BIG: dict[str, Any] = {"pad": (1, 1), "to": "bfloat16", "bench": True, "mixed": ["x_scale", "w_scale"]}

SPEC = OpSpec(
    name="int8_conv2d",
    signature=(
        "x[B, H, W, C]: i8, w[O, R, S, I]: i8, x_scale[1]: float, w_scale[O]: float, bias[O]?: float, stride_h: int, "
        "stride_w: int, pad_h: int, pad_w: int, dilation_h: int, dilation_w: int, groups: int, activation: str?, "
        "dtype: str -> y[B, P, Q, O]: given"
    ),
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    derive=conv2d.derive,
    refuse=refuse,
    nonempty=("R", "S", "C", "O"),
    ulps=1,
    independent=("B",),
    matmul_rate=2.0,
    prefer_torch=(
        Rule(
            when="with a stride, groups, or channels that are no multiple of 128",
            runs="cuDNN, in fp32",
            why="TMA cannot read these",
            holds=conv2d.by_pointers,
        ),
    ),
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", image=(1, 4, 4, 8),
             kernel=(8, 3, 3), pad=(1, 1)),
        Case("ragged", "no size is a multiple of a block, and the axes differ", image=(2, 5, 7, 6), kernel=(9, 3, 2),
             pad=(0, 1), bias=True),
        Case("all", "stride, dilation and groups at once", image=(1, 11, 9, 12), kernel=(6, 3, 2), pad=(2, 1),
             stride=(2, 2), dilation=(2, 3), groups=3, bias=True),
        Case("point", "one pixel of kernel: a matrix product", image=(2, 3, 5, 24), kernel=(16, 1, 1), bias=True),
        Case("gelu", "the activation follows the bias", image=(2, 4, 4, 16), kernel=(8, 3, 3), pad=(1, 1), bias=True,
             activation="gelu"),
        Case("deep", "a sum past 2^24, which fp32 would round", image=(1, 2, 2, 4001), kernel=(5, 1, 1),
             deep=True, to="float32"),
        Case("half", "16-bit results are rounded once, from fp32", image=(1, 4, 5, 8), kernel=(8, 3, 3), to="float16",
             mixed=["x_scale", "w_scale"]),
        Case("double", "an fp64 result of fp32 scales", image=(1, 4, 5, 8), kernel=(8, 3, 3), to="float64",
             mixed=["x_scale", "w_scale"]),
        Case("empty", "there is no image, and nothing is launched", image=(0, 4, 4, 8), kernel=(8, 3, 3), pad=(1, 1)),
        Case("c128", "ResNet-50's 3x3 at 56 x 56", image=(32, 56, 56, 128), kernel=(128, 3, 3), **BIG),
        Case("c256", "ResNet-50's 3x3 at 28 x 28", image=(32, 28, 28, 256), kernel=(256, 3, 3), **BIG),
        Case("c512", "its 3x3 at 14 x 14, which has few pixels", image=(32, 14, 14, 512), kernel=(512, 3, 3), **BIG),
    ],
)  # fmt: skip
