"""BatchNorm: normalise each channel to zero mean and unit variance over the batch, then scale and shift it.

    y[b, c, s] = (x[b, c, s] - mean[c]) * r[c] * w[c] + b[c]        r[c] = 1 / sqrt(var[c] + eps)

In training, mean and var (divided by n = B * S) are the batch's statistics, and the running statistics are updated:

    new_mean = (1 - momentum) * running_mean + momentum * mean
    new_var  = (1 - momentum) * running_var  + momentum * var * n / (n - 1)

Without running statistics, new_mean and new_var are the batch's mean and its unbiased variance. In inference the
running statistics normalise x and are returned unchanged; an empty batch also returns them unchanged. They have no
gradient. With `relu`, y is max(y, 0): a kernel of its own would read and write y once more.

Dims: B = batch, C = channels, S = zero or more further dims.
Paper: https://arxiv.org/abs/1502.03167
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims


class Args(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor | None
    b: torch.Tensor | None
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    training: bool
    momentum: float
    eps: float
    relu: bool


def reference(a: Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The definition, one channel per row."""
    running_mean, running_var, momentum = a.running_mean, a.running_var, a.momentum
    rows = a.x.transpose(0, 1).flatten(1)  # [C, n]
    n = rows.shape[1]
    if a.training:
        mean, var = rows.mean(1), (rows - rows.mean(1, keepdim=True)).square().mean(1)
    else:
        assert running_mean is not None and running_var is not None
        mean, var = running_mean, running_var
    out = (rows - mean[:, None]) / torch.sqrt(var[:, None] + a.eps)
    out = out if a.w is None else out * a.w[:, None]
    out = out if a.b is None else out + a.b[:, None]
    out = out.relu() if a.relu else out
    y = out.unflatten(1, (a.x.shape[0], *a.x.shape[2:])).transpose(0, 1)
    if running_mean is None or running_var is None:
        return y, mean, var * n / (n - 1)
    if not a.training or not n:
        return y, running_mean, running_var
    new_var = (1 - momentum) * running_var + momentum * var * n / (n - 1)
    return y, (1 - momentum) * running_mean + momentum * mean, new_var


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    absent = [name for name in ("running_mean", "running_var") if args[name] is None]
    if len(absent) == 1:
        given = "running_mean" if absent == ["running_var"] else "running_var"
        raise ArgumentError(
            f"batch_norm: {given} is given and {absent[0]} is None",
            hint="give both, or neither to normalise by the batch alone",
        )
    if absent and not args["training"]:
        raise ArgumentError(
            "batch_norm: training is False and running_mean is None, and inference normalises by running statistics",
            hint="give running_mean and running_var, or pass training=True to use the batch's own",
        )
    x = args["x"]
    if args["training"] and x.numel() and x.numel() == x.shape[1]:
        raise ArgumentError(
            f"batch_norm: x has shape {list(x.shape)}, one value per channel, and training wants two or more",
            hint="a single value has no variance: give a larger batch, or training=False",
        )


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    shape = case["shape"]
    C = shape[1]
    x = case.get("shift", 0.0) + case.get("scale", 1.0) * streams.normal("x", *shape)
    if "plant" in case.params:
        x[(0, C // 2, *(0 for _ in shape[2:]))] = case["plant"]
    running = case.get("running", True)
    return {
        "x": x,
        "w": 1 + 0.1 * streams.normal("w", C) if case.get("affine", True) else None,
        "b": 0.1 * streams.normal("b", C) if case.get("affine", True) else None,
        "running_mean": 0.1 * streams.normal("running_mean", C) if running else None,
        "running_var": 0.5 + streams.uniform("running_var", C) if running else None,
        "training": case.get("training", True),
        "momentum": case.get("momentum", streams.choice("momentum", 0.1, 0.6)),
        "eps": case.get("eps", streams.choice("eps", 1e-5, 0.02, 0.7)),
        "relu": case.get("relu", False),
    }


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """x is read once and y is written once. In training, a tensor larger than the L2 must be read twice: three
    transfers instead of these two.
    """
    n = dims["B"] * dims["C"] * dims["S"]
    return Cost(flops=7 * n, bytes=(2 * n + 2 * dims["C"]) * itemsize + 4 * 6 * dims["C"])


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """dy and x are read once and dx is written once; a tensor larger than the L2 takes five transfers, not three."""
    n = dims["B"] * dims["C"] * dims["S"]
    return Cost(flops=11 * n, bytes=(3 * n + 3 * dims["C"]) * itemsize + 4 * 2 * dims["C"])


nan, inf = float("nan"), float("inf")
SPEC = OpSpec(
    name="batch_norm",
    signature="x[B, C, *S], w[C]?: float, b[C]?: float, running_mean[C]?: float, running_var[C]?: float, "
    "training: bool, momentum: float, eps: float, relu: bool "
    "-> y[B, C, *S], new_mean[C]: acc, new_var[C]: acc; mean[C]: acc, r[C]: acc",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    refuse=refuse,
    cost_backward=cost_backward,
    grads=("x", "w", "b"),
    saves=("x", "w", "b", "mean", "r"),
    constant=("new_mean", "new_var"),
    like_first=("y", "x"),
    ulps=1,
    independent=("C",),
    peers=True,
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", shape=(4, 8, 4, 4)),
        Case("ragged", "no side is a multiple of a block, so every mask is used", shape=(5, 7, 11, 13)),
        Case("columns", "there is no S: the channel is the contiguous dim", shape=(37, 19)),
        Case("many", "more channels than a block holds, and several programs share each", shape=(19, 530)),
        Case("line", "one further dim, as sequences have", shape=(3, 6, 29)),
        Case("volume", "three further dims, and a batch of one", shape=(1, 3, 5, 6, 7)),
        Case("plane", "a plane longer than a tile is split over programs", shape=(3, 2, 70, 71)),
        Case("pair", "n = 2 is the smallest batch with a variance, and dx cancels", shape=(2, 33)),
        Case("bare", "no weight, no bias, no running statistics", shape=(4, 6, 9), affine=False, running=False),
        Case("first", "no running statistics: the new ones are the batch's own", shape=(4, 6, 9), running=False),
        Case("plain", "running statistics without weight and bias", shape=(4, 6, 9), affine=False),
        Case("inference", "the running statistics normalise and stay as they were", shape=(4, 6, 9), training=False),
        Case("columns_inference", "inference without S, and one row alone", shape=(1, 70), training=False),
        Case("plain_inference", "inference without weight and bias", shape=(4, 6, 9), affine=False, training=False),
        Case("eager_momentum", "momentum 1 forgets the old statistics, so mixing the two up shows",
             shape=(4, 6, 9), momentum=1.0),
        Case("slow_momentum", "momentum 0 keeps the old statistics", shape=(4, 6, 9), momentum=0.0),
        Case("far", "a mean 1,000 times the spread: E[x^2] - E[x]^2 loses every digit", shape=(8, 3, 25, 27),
             shift=100.0, scale=0.1),
        Case("faint", "the variance is near eps, so a kernel that drops eps shows it", shape=(4, 5, 12), scale=2e-3,
             eps=1e-5),
        Case("loud", "x^2 is past fp16's largest value, so squaring must happen in fp32", shape=(4, 5, 12), scale=1e3),
        Case("zero", "every channel is all zeros and only eps keeps it finite", shape=(4, 5, 12), scale=0.0),
        Case("mixed", "weight, bias and statistics stay fp32 beside 16-bit activations", shape=(4, 5, 12),
             mixed=["w", "b", "running_mean", "running_var"]),
        Case("relu", "negative values are zeros, and so are their gradients, in the sums of dw and db too",
             shape=(5, 7, 11, 13), relu=True),
        Case("relu_columns", "the same without S, over several tiles of a program", shape=(70, 19), relu=True),
        Case("relu_plain", "the sign is that of the normalised value alone", shape=(4, 6, 9), affine=False, relu=True),
        Case("relu_inference", "the same by the running statistics", shape=(4, 6, 9), training=False, relu=True),
        Case("relu_nan", "a ReLU keeps a NaN, and no other channel has one", shape=(3, 5, 14), plant=nan, relu=True),
        Case("nan", "a NaN spoils its own channel and no other", shape=(3, 5, 14), plant=nan),
        Case("inf", "an infinity makes its channel NaN and its mean infinite", shape=(3, 5, 14), plant=inf),
        Case("empty", "an empty batch leaves the running statistics as they are", shape=(0, 5, 14)),
        Case("empty_first", "the mean of nothing is NaN", shape=(0, 5, 14), running=False, affine=False),
        Case("wide_tiles", "tiles have so many channels that few programs share them", shape=(260, 130, 2), sms=16,
             frozen=["w", "b"]),  # torch adds up 520 rows one by one: its fp32 sums are 3 ulps off
        Case("resnet_stem", "the first norm of a ResNet-50 at batch 32: few channels, many values each", bench=True,
             shape=(32, 64, 112, 112)),
        Case("resnet_last", "its last norm at batch 256: many channels of 7 x 7 values", bench=True,
             shape=(256, 2048, 7, 7)),
        Case("decoder", "an image decoder: four times the L2, so statistics cost a pass of their own", bench=True,
             shape=(4, 128, 512, 512)),
        Case("tokens", "16k tokens of an 8B model, channels last", bench=True, shape=(16384, 4096)),
        Case("odd", "an odd C has no aligned rows", bench=True, shape=(16384, 4095)),
        Case("decoder_inference", "inference is one pass", bench=True, shape=(4, 128, 512, 512), training=False),
        Case("resnet_relu", "a norm and its ReLU inside ResNet-50 at batch 32, channels last", bench=True,
             shape=(32 * 56 * 56, 256), relu=True),
    ],
)  # fmt: skip
