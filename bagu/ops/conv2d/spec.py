"""Convolution of images, with the channels last in memory (NHWC).

    y[b, p, q, o] = act(sum_{r, s, i} x[b, p * stride_h + r * dilation_h - pad_h, q * stride_w + s * dilation_w - pad_w,
                                        g * I + i] * w[o, r, s, i] + bias[o])        g = o // (O / groups)

x is zero outside of the image. With `groups`, an output channel reads only the input channels of its group; groups = C
is a depthwise convolution. `activation` is None, "gelu" (exact), "silu" or "relu". The sum is accumulated in fp32 (fp64
for fp64). The public function takes NCHW tensors of any memory format, as torch does.
Dims: B = images, H x W = pixels, C = channels, O = output channels, R x S = taps, I = C / groups, P x Q = pixels of y.
Paper: https://arxiv.org/abs/1410.0759 (cuDNN: convolution as an implicit matrix product)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from bagu.errors import ArgumentError, UnknownName
from bagu.ops.activations import ACTIVATIONS, activate
from bagu.ops.contract.core import Case, Cost, OpSpec, Rule, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.conv2d.tiles import Steps

Pair = tuple[int, int]
AXES = (("h", "H", "R"), ("w", "W", "S"))


class Args(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    stride_h: int
    stride_w: int
    pad_h: int
    pad_w: int
    dilation_h: int
    dilation_w: int
    groups: int
    activation: str | None


def reference(a: Args) -> torch.Tensor:
    """The definition."""
    steps = (a.stride_h, a.stride_w), (a.pad_h, a.pad_w), (a.dilation_h, a.dilation_w)
    if a.x.dtype == torch.float32:  # the error of fp32 is that of torch's fp32 convolution, which may be Winograd's
        return activate(convolved(a.x, a.w, a.bias, *steps, a.groups), a.activation)
    y = by_taps(a.x, a.w, *steps, a.groups)
    return activate(y if a.bias is None else y + a.bias, a.activation)


def channels_first(x: torch.Tensor) -> torch.Tensor:
    """[B, H, W, C] as a view [B, C, H, W]."""
    return x.permute(0, 3, 1, 2)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] as a view [B, H, W, C]."""
    return x.permute(0, 2, 3, 1)


def convolved(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    stride: tuple[int, int],
    pad: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
) -> torch.Tensor:
    y = F.conv2d(channels_first(x), channels_first(w), bias, stride, pad, dilation, groups)
    return channels_last(y)


def by_taps(x: torch.Tensor, w: torch.Tensor, stride: Pair, pad: Pair, dilation: Pair, groups: int) -> torch.Tensor:
    """One product per tap, of the pixels that the tap reads and its weights."""
    (B, H, W, _), (O, R, S, I) = x.shape, w.shape
    P, Q = Steps(stride=stride, pad=pad, dilation=dilation).out((H, W), (R, S))
    padded = F.pad(x, (0, 0, pad[1], pad[1], pad[0], pad[0])).unflatten(3, (groups, I))
    each = w.reshape(groups, O // groups, R, S, I)
    z = x.new_zeros(B, P, Q, groups, O // groups)
    for r in range(R):
        for s in range(S):
            rows = slice(r * dilation[0], r * dilation[0] + (P - 1) * stride[0] + 1, stride[0])
            columns = slice(s * dilation[1], s * dilation[1] + (Q - 1) * stride[1] + 1, stride[1])
            z = z + torch.einsum("bpqgi,goi->bpqgo", padded[:, rows, columns], each[:, :, r, s])
    return z.flatten(3)


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    refuse_convolution("conv2d", args, dims)


def refuse_convolution(op: str, args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments of a convolution that are invalid in ways the signature cannot check."""
    if args["activation"] not in (None, *ACTIVATIONS):
        raise UnknownName.among(f"activation of {op}", args["activation"], ACTIVATIONS)
    groups, C, O, I = args["groups"], dims["C"], dims["O"], dims["I"]
    if groups < 1 or C % groups or O % groups:
        raise ArgumentError(
            f"{op}: groups is {groups}, expected a number that divides the {C} input channels and the {O} output"
            " channels"
        )
    if I * groups != C:
        raise ArgumentError(
            f"{op}: w has {I} input channels, expected {C // groups}: x has {C} channels in {groups} group(s)"
        )
    for axis, size, taps in AXES:
        stride, pad, dilation = (args[f"{name}_{axis}"] for name in ("stride", "pad", "dilation"))
        if stride < 1 or dilation < 1 or pad < 0:
            raise ArgumentError(
                f"{op}: along {size} the stride is {stride}, the padding {pad} and the dilation {dilation}; expected"
                " at least 1, 0 and 1"
            )
        reach = dilation * (dims[taps] - 1) + 1
        if dims[taps] and reach > dims[size] + 2 * pad:
            raise ArgumentError(
                f"{op}: along {size} the kernel covers {reach} pixels, the padded image has {dims[size] + 2 * pad}",
                hint="use a smaller kernel or dilation, or more padding",
            )


def derive(args: Mapping[str, Any], dims: Dims) -> Dims:
    """The sizes of the output."""
    pairs = {name: (args[f"{name}_h"], args[f"{name}_w"]) for name in ("stride", "pad", "dilation")}
    P, Q = Steps(**pairs).out((dims["H"], dims["W"]), (dims["R"], dims["S"]))
    return {"P": P, "Q": Q}


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    B, H, W, C = case["image"]
    O, R, S = case["kernel"]
    groups = case.get("groups", 1)
    if case.get("nchw", False):
        x = streams.normal("x", B, C, H, W).permute(0, 2, 3, 1)
    else:
        x = streams.normal("x", B, H, W, C)
    if "plant" in case.params:
        x[0, H // 2, W // 2, C // 2] = case["plant"]
    (stride_h, stride_w), (pad_h, pad_w) = case.get("stride", (1, 1)), case.get("pad", (0, 0))
    dilation_h, dilation_w = case.get("dilation", (1, 1))
    return {
        "x": x,
        "w": (R * S * C // groups) ** -0.5 * streams.normal("w", O, R, S, C // groups),
        "bias": streams.normal("bias", O) if case.get("bias", False) else None,
        "stride_h": stride_h,
        "stride_w": stride_w,
        "pad_h": pad_h,
        "pad_w": pad_w,
        "dilation_h": dilation_h,
        "dilation_w": dilation_w,
        "groups": groups,
        "activation": case.get("activation", None),
    }


def cost(dims: Mapping[str, Any], itemsize: int) -> Cost:
    """A product and a sum per output and tap; x and w are read once and y is written once."""
    pixels, image = dims["B"] * dims["P"] * dims["Q"], dims["B"] * dims["H"] * dims["W"]
    weight = dims["O"] * dims["R"] * dims["S"] * dims["I"]
    return Cost(flops=2 * pixels * weight, bytes=(image * dims["C"] + weight + pixels * dims["O"]) * itemsize)


def cost_backward(dims: Mapping[str, Any], itemsize: int) -> Cost:
    """Two products of the same size; dy, x and w are read once, dx and dw are written once."""
    forward = cost(dims, itemsize)
    image = dims["B"] * dims["H"] * dims["W"] * dims["C"]
    weight = dims["O"] * dims["R"] * dims["S"] * dims["I"]
    return Cost(flops=2 * forward.flops, bytes=forward.bytes + (image + weight) * itemsize)


def by_pointers(args: Mapping[str, Any]) -> bool:
    """Whether TMA cannot read these: see triton_backend.py."""
    (O, R, S, I), C = args["w"].shape, args["x"].shape[3]
    strided = max(args["stride_h"], args["stride_w"]) > 1 and (R, S) != (1, 1)
    return strided or I != C or C * args["x"].element_size() % 128 != 0 or O % 8 != 0 or args["x"].element_size() > 2


SAME: dict[str, Any] = {"pad": (1, 1), "bench": True}

SPEC = OpSpec(
    name="conv2d",
    signature=(
        "x[B, H, W, C], w[O, R, S, I], bias[O]?, stride_h: int, stride_w: int, pad_h: int, pad_w: int, "
        "dilation_h: int, dilation_w: int, groups: int, activation: str? -> y[B, P, Q, O]"
    ),
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("x", "w", "bias"),
    saves=("x", "w", "bias"),
    derive=derive,
    refuse=refuse,
    nonempty=("R", "S", "C", "O"),
    ulps=1,
    independent=("B",),
    peers=True,
    prefer_torch=(
        Rule(
            when="always",
            runs="cuDNN",
            why="on an H200 it is 3 to 9 % faster at 3 x 3 kernels of 128 to 512 channels, and more elsewhere",
            holds=lambda args: True,
        ),
    ),
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", image=(1, 4, 4, 8),
             kernel=(8, 3, 3), pad=(1, 1)),
        Case("ragged", "no size is a multiple of a block, and the axes differ", image=(2, 5, 7, 6), kernel=(9, 3, 2),
             pad=(0, 1), bias=True),
        Case("valid", "no padding: the output is smaller than the image", image=(2, 6, 5, 16), kernel=(24, 3, 3)),
        Case("wide_pad", "more padding than the kernel reaches: a border that reads zeros alone", image=(1, 3, 4, 8),
             kernel=(8, 2, 2), pad=(3, 2), bias=True),
        Case("stride", "the stride differs between the axes", image=(2, 9, 8, 8), kernel=(16, 3, 3), pad=(1, 1),
             stride=(2, 3)),
        Case("one_tap", "a tap of one pixel: the pixels that the stride skips are not read", image=(2, 7, 8, 8),
             kernel=(16, 1, 1), stride=(2, 3)),
        Case("dilation", "the dilation differs between the axes", image=(1, 9, 10, 16), kernel=(8, 3, 3), pad=(2, 3),
             dilation=(2, 3), bias=True),
        Case("groups", "two groups, which share nothing", image=(2, 4, 5, 16), kernel=(24, 3, 3), pad=(1, 1), groups=2),
        Case("depthwise", "a group per channel, two outputs each", image=(2, 5, 4, 6), kernel=(12, 3, 3), pad=(1, 1),
             groups=6, bias=True),
        Case("all", "stride, dilation, groups and an activation at once", image=(1, 11, 9, 12), kernel=(6, 3, 2),
             pad=(2, 1), stride=(2, 2), dilation=(2, 1), groups=3, bias=True, activation="silu"),
        Case("point", "one pixel of kernel: a matrix product", image=(2, 3, 5, 24), kernel=(16, 1, 1), bias=True),
        Case("point_stride", "one tap and a stride: pixels are skipped", image=(2, 5, 5, 16), kernel=(8, 1, 1),
             stride=(2, 2)),
        Case("line", "an image of one row: conv1d", image=(3, 1, 20, 8), kernel=(16, 1, 5), pad=(0, 2), bias=True),
        Case("whole", "the kernel is the image: one output pixel", image=(3, 4, 3, 8), kernel=(5, 4, 3)),
        Case("thin", "one channel in and one out", image=(2, 6, 6, 1), kernel=(1, 3, 3), pad=(1, 1), bias=True),
        Case("gelu", "the activation follows the bias", image=(2, 4, 4, 16), kernel=(8, 3, 3), pad=(1, 1), bias=True,
             activation="gelu"),
        Case("gelu_tanh", "the gelu of GPT-2, not the exact one", image=(1, 4, 4, 8), kernel=(8, 3, 3), pad=(1, 1),
             activation="gelu_tanh"),
        Case("silu", "an activation without a bias", image=(1, 5, 4, 8), kernel=(8, 3, 3), activation="silu"),
        Case("relu", "negative sums are zeros", image=(1, 5, 4, 8), kernel=(16, 3, 3), pad=(1, 1), bias=True,
             activation="relu"),
        Case("deep", "several blocks of channels and of outputs", image=(2, 6, 6, 160), kernel=(136, 3, 3),
             pad=(1, 1), bias=True, sms=1),
        Case("nan", "a NaN spoils the pixels around it and no other", image=(1, 7, 7, 8), kernel=(8, 3, 3), pad=(1, 1),
             plant=float("nan")),
        Case("empty", "there is no image, and nothing is launched", image=(0, 4, 4, 8), kernel=(8, 3, 3), pad=(1, 1)),
        Case("c128", "ResNet-50's 3x3 at 56 x 56", image=(32, 56, 56, 128), kernel=(128, 3, 3), **SAME),
        Case("c256", "ResNet-50's 3x3 at 28 x 28", image=(32, 28, 28, 256), kernel=(256, 3, 3), **SAME),
        Case("c512", "its 3x3 at 14 x 14: few pixels, many channels", image=(32, 14, 14, 512), kernel=(512, 3, 3),
             **SAME),
        Case("c256_nchw", "the image has its channels first in memory, and is moved before", image=(32, 28, 28, 256),
             kernel=(256, 3, 3), nchw=True, **SAME),
        Case("point_256", "its 1x1 from 64 to 256 channels", image=(32, 56, 56, 64), kernel=(256, 1, 1), bench=True),
    ],
)  # fmt: skip
