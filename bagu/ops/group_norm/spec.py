"""GroupNorm: normalise each group of channels of each sample to zero mean and unit variance, then scale and shift.

    y[b, c, s] = (x[b, c, s] - mean[b, g]) * r[b, g] * w[c] + b[c]        g = c // D
    r[b, g] = 1 / sqrt(var[b, g] + eps)        mean and var over the D channels of a group and all of S

Dims: B = batch, C = channels, D = C / groups, S = zero or more further dims.
Paper: https://arxiv.org/abs/1803.08494
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
    groups: int
    eps: float


def reference(a: Args) -> torch.Tensor:
    """The definition, one group per row."""
    x = a.x
    rows = x.unflatten(1, (a.groups, x.shape[1] // a.groups)).flatten(2)  # [B, groups, D * S]
    off = rows - rows.mean(2, keepdim=True)
    y = (off / torch.sqrt(off.square().mean(2, keepdim=True) + a.eps)).reshape(x.shape)
    along = (-1, *(1 for _ in x.shape[2:]))
    y = y if a.w is None else y * a.w.view(along)
    return y if a.b is None else y + a.b.view(along)


def derive(args: Mapping[str, Any], dims: Dims) -> Dims:
    """Return D, the channels per group; raise if the channels do not divide into equal groups."""
    C, groups = dims["C"], dims["groups"]
    if groups < 1 or C % groups:
        raise ArgumentError(
            f"group_norm: groups is {groups}, and x has {C} channels, which it must divide",
            hint="a group is a whole number of channels: 1 group is all of them, one per channel is C groups",
        )
    return {"D": C // groups}


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    shape = case["shape"]
    C = shape[1]
    x = case.get("shift", 0.0) + case.get("scale", 1.0) * streams.normal("x", *shape)
    if "plant" in case.params:
        x[(0, C // 2, *(0 for _ in shape[2:]))] = case["plant"]
    return {
        "x": x,
        "w": 1 + 0.1 * streams.normal("w", C) if case.get("w", True) else None,
        "b": 0.1 * streams.normal("b", C) if case.get("b", True) else None,
        "groups": case["groups"],
        "eps": case.get("eps", streams.choice("eps", 1e-5, 0.02, 0.7)),
    }


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """x is read once and y is written once. Groups that are too long for one program, in a tensor larger than the L2,
    must be read twice: three transfers instead of these two.
    """
    n = dims["B"] * dims["C"] * dims["S"]
    return Cost(flops=7 * n, bytes=(2 * n + 2 * dims["C"]) * itemsize + 4 * 2 * dims["B"] * dims["groups"])


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """dy and x are read once and dx is written once; long groups past the L2 take five transfers, not three."""
    n = dims["B"] * dims["C"] * dims["S"]
    return Cost(flops=11 * n, bytes=(3 * n + 3 * dims["C"]) * itemsize + 4 * 2 * dims["B"] * dims["groups"])


nan, inf = float("nan"), float("inf")
SPEC = OpSpec(
    name="group_norm",
    signature="x[B, C, *S], w[C]?: float, b[C]?: float, groups: int, eps: float -> y[B, C, *S]; "
    "mean[B, groups]: acc, r[B, groups]: acc",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("x", "w", "b"),
    saves=("x", "w", "b", "mean", "r"),
    derive=derive,
    ulps=1,
    # Triton 3.7: with the largest tiles, at most 0.5 % of the instructions of a loop. Triton 3.6: no spills
    spills={"_forward": 4, "_backward": 22},
    independent=("B", "groups"),
    peers=True,
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", shape=(4, 8, 4, 4), groups=2),
        Case("ragged", "no side is a multiple of a block, so every mask is used", shape=(5, 21, 5, 7), groups=7),
        Case("columns", "there is no S: a group is contiguous channels", shape=(13, 18), groups=3),
        Case("narrow", "groups are short and many, so one program owns several of them", shape=(23, 35), groups=7),
        Case("line", "one further dim, as sequences have", shape=(3, 6, 29), groups=3),
        Case("volume", "three further dims after the channels", shape=(2, 6, 3, 5, 6), groups=2),
        Case("one_group", "one group is LayerNorm over the whole sample", shape=(3, 6, 11), groups=1),
        Case("each_alone", "as many groups as channels is InstanceNorm", shape=(3, 6, 11), groups=6),
        Case("point", "a group of one value: y is the bias and dx is zero", shape=(8, 6), groups=6),
        Case("bare", "no weight and no bias", shape=(4, 6, 9), groups=2, w=False, b=False),
        Case("scaled", "a weight without a bias", shape=(4, 6, 9), groups=2, b=False),
        Case("bias_only", "a bias without a weight", shape=(4, 6, 9), groups=2, w=False),
        Case("far", "a mean 1,000 times the spread: E[x^2] - E[x]^2 loses every digit", shape=(3, 6, 25, 27), groups=2,
             shift=100.0, scale=0.1),
        Case("faint", "the variance is near eps, so a kernel that drops eps shows it", shape=(4, 6, 12), groups=2,
             scale=2e-3, eps=1e-5),
        Case("loud", "x^2 is past fp16's largest value, so squaring must happen in fp32", shape=(4, 6, 12), groups=2,
             scale=1e3),
        Case("zero", "every group is all zeros and only eps keeps it finite", shape=(4, 6, 12), groups=2, scale=0.0),
        Case("mixed", "weight and bias stay fp32 beside 16-bit activations", shape=(4, 6, 12), groups=2,
             mixed=["w", "b"]),
        Case("nan", "a NaN spoils its own group of its own sample and no other", shape=(3, 6, 14), groups=3, plant=nan),
        Case("inf", "an infinity makes its group NaN and no other", shape=(3, 6, 14), groups=3, plant=inf),
        Case("runs", "odd planes whose groups are aligned: read as one run, in which channels end anywhere",
             shape=(5, 16, 9, 17), groups=2),
        Case("runs_bare", "such runs with no weight and no bias", shape=(3, 16, 9, 15), groups=2, w=False, b=False),
        Case("runs_nan", "a NaN in a run spoils the sums of its own channel", shape=(2, 16, 9, 17), groups=2,
             plant=nan),
        Case("runs_far", "a run whose mean is 1,000 times the spread", shape=(2, 16, 9, 17), groups=2,
             shift=100.0, scale=0.1),
        Case("shared", "groups of 45 values a plane, 1,035 in all: their ends share eights with the next",
             shape=(3, 184, 5, 9), groups=8),
        Case("shared_nan", "a NaN beside a shared eight stays in its own group", shape=(2, 184, 5, 9), groups=8,
             plant=nan),
        Case("short_planes", "the shortest planes a run may have, 9 values, and many channels", shape=(3, 240, 9),
             groups=2),
        Case("wide", "a group does not fit a program, so several share it", shape=(2, 4, 67, 131), groups=2),
        Case("wide_bare", "long groups with no weight and no bias", shape=(1, 4, 131, 67), groups=2, w=False, b=False),
        Case("wide_far", "long groups whose mean is 1,000 times the spread", shape=(1, 2, 9999), groups=1,
             shift=100.0, scale=0.1),
        Case("wide_inf", "a long group's infinity spoils it and no other", shape=(1, 2, 16500), groups=2, plant=inf),
        Case("channels", "aligned planes of more channels than are gathered at once", shape=(2, 40, 16), groups=2),
        Case("large", "a run so long that a program has no room to read ahead", shape=(2, 2, 4104), groups=1),
        Case("lone", "one group is split for want of others, and has more channels than one block adds up",
             shape=(1, 160, 27), groups=1),
        Case("features", "a long group of pairs: a program has so many channels that it adds up parts in several trips",
             shape=(1, 2052, 2), groups=1),
        Case("empty", "a batch of none: nothing is launched", shape=(0, 6, 9), groups=2),
        Case("empty_bare", "a batch of none, without weight and bias", shape=(0, 6, 9), groups=2, w=False, b=False),
        Case("unet_bottom", "the middle of an image U-Net at batch 32: groups that fit a program", bench=True,
             shape=(32, 1280, 16, 16), groups=32),
        Case("unet_top", "its first level at batch 8: groups of 40,960 values", bench=True,
             shape=(8, 320, 64, 64), groups=32),
        Case("decoder", "an image decoder: 128 groups of a million values, four times the L2", bench=True,
             shape=(4, 128, 512, 512), groups=32),
        Case("tokens", "16k tokens of an 8B model, a group per head", bench=True, shape=(16384, 4096), groups=32),
        Case("planes", "28 x 28 planes, the aligned twin of `odd`", bench=True, shape=(128, 512, 28, 28), groups=32),
        Case("odd", "27 x 27 planes begin anywhere, 16 of them not", bench=True, shape=(128, 512, 27, 27), groups=32),
        Case("odd_groups", "groups of 15 such planes begin anywhere too", bench=True, shape=(128, 480, 27, 27),
             groups=32),
        Case("even_groups", "15 planes of 28 x 28, the aligned twin of `odd_groups`", bench=True,
             shape=(128, 480, 28, 28), groups=32),
    ],
)  # fmt: skip
