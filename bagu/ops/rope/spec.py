"""Rotary position embedding: rotate each pair of features by an angle proportional to the token's position.

    a' = a * cos[p, r] - b * sin[p, r]
    b' = b * cos[p, r] + a * sin[p, r]        p = positions[t], or the index along the last of the dims T

    layout = "half":          (a, b) = (x[r], x[r + R])
    layout = "interleaved":   (a, b) = (x[2r], x[2r + 1])

Features from 2R on are unchanged. The gradient of x is the rotation by the opposite angle; the tables have no gradient.
Dims: T = tokens (batch and time), H = heads, D = head dim, P = positions in the tables, R = pairs, 2R <= D.
Paper: https://arxiv.org/abs/2104.09864
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError, UnknownName
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.contract.values import check_range

LAYOUTS = ("half", "interleaved")
INF, NAN = float("inf"), float("nan")


class Args(NamedTuple):
    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None
    layout: str


def reference(args: Args) -> torch.Tensor:
    """The definition, by the indices of each pair."""
    x = args.x
    R = args.cos.shape[1]
    r = torch.arange(R, device=x.device)
    a, b = (r, r + R) if args.layout == "half" else (2 * r, 2 * r + 1)
    p = torch.arange(x.shape[-3], device=x.device) if args.positions is None else args.positions
    c, s = args.cos[p].unsqueeze(-2), args.sin[p].unsqueeze(-2)
    y = x.clone()
    y[..., a] = x[..., a] * c - x[..., b] * s
    y[..., b] = x[..., b] * c + x[..., a] * s
    return y


def check_values(args: Mapping[str, Any], dims: Dims) -> None:
    if args["positions"] is not None:
        check_range("rope", "positions", args["positions"], dims["P"], "a table")


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    """cos and sin are independent random numbers, so that a kernel that swaps them fails."""
    lead, H, D, R = case.get("lead", (case.get("T", 1),)), case["H"], case["D"], case["R"]
    P = case.get("P", lead[-1])
    x = streams.normal("x", *lead, H, D) * case.get("scale", 1.0)
    for feature, value in case.get("plant", {}).items():
        x[..., 0, 0, feature] = value
    return {
        "x": x,
        "cos": 2 * streams.uniform("cos", P, R) - 1,
        "sin": 2 * streams.uniform("sin", P, R) - 1,
        "positions": streams.integers("positions", 0, P, *lead) if case.get("positions", False) else None,
        "layout": case.get("layout", streams.choice("layout", "half", "interleaved")),
    }


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    if args["layout"] not in LAYOUTS:
        raise UnknownName.among("layout of rope", args["layout"], LAYOUTS)
    if 2 * dims["R"] > dims["D"]:
        raise ArgumentError(
            f"rope: cos has R = {dims['R']} pairs, and x has D = {dims['D']} features; expected 2R <= D",
            hint="a table has one column per pair, half as many as the features it turns",
        )
    if args["positions"] is None and not dims["T"]:
        raise ArgumentError("rope: x has no token dim and there are no positions", hint="pass x as [1, H, D]")
    if args["positions"] is None and dims["T"][-1] > dims["P"]:
        raise ArgumentError(
            f"rope: x has {dims['T'][-1]} tokens, and the tables have {dims['P']} positions",
            hint="make longer tables with rope_tables, or pass positions",
        )


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Four products and two sums per pair; x is read, y is written, each used row of the fp32 tables is read once."""
    T, H, D, R = dims["T"], dims["H"], dims["D"], dims["R"]
    return Cost(flops=6 * T * H * R, bytes=2 * T * H * D * itemsize + 2 * 4 * min(dims["P"], T) * R)


HEAD: dict[str, Any] = {"H": 4, "D": 16, "R": 8}
BIG: dict[str, Any] = {"T": 32768, "H": 32, "D": 128, "R": 64, "P": 32768, "bench": True, "mixed": ["cos", "sin"]}

SPEC = OpSpec(
    name="rope",
    signature="x[*T, H, D], cos[P, R]: float, sin[P, R]: float, positions[*T]?: int, layout: str -> y[*T, H, D]",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    check_values=check_values,
    cost_backward=cost,
    grads=("x",),
    saves=("cos", "sin", "positions"),
    refuse=refuse,
    ulps=1,
    independent=("T", "H"),
    peers=True,
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", T=4, H=2, D=16, R=8),
        Case("ragged", "no side is a multiple of a block, and a head is more than a small block", T=5, H=3, D=143,
             R=70, P=40, positions=True),
        Case("batched", "positions start again in each batch", lead=(2, 5), P=9, **HEAD),
        Case("positions", "each token has a position of its own", lead=(2, 5), P=300, positions=True, **HEAD),
        Case("deep", "three token dims are folded into two", lead=(2, 3, 4), H=1, D=8, R=4, positions=True, P=11),
        Case("interleaved", "a pair is two neighbours, in registers", T=6, H=4, D=32, R=16, layout="interleaved"),
        Case(
            "interleaved_odd", "pairs are neighbours, and an odd rest passes through",
            lead=(2, 3), H=3, D=21, R=7, P=8, positions=True, layout="interleaved",
        ),
        Case("partial", "only the first quarter of a head is turned", T=3, H=4, D=64, R=8, positions=True, P=50),
        Case("one_head", "a head is less than a program's share, so it owns several tokens", T=67, H=1, D=8, R=4),
        Case("many_heads", "the heads of one token are several programs", T=2, H=130, D=66, R=33),
        Case("empty", "there is no token, and nothing is launched", T=0, H=2, D=16, R=8, P=3),
        Case("pair", "the smallest head: one pair", T=9, H=5, D=2, R=1, layout="interleaved"),
        Case("mixed", "the tables stay fp32 beside 16-bit activations", T=8, H=4, D=32, R=16, mixed=["cos", "sin"]),
        Case("loud", "a sum past fp16's largest value is an infinity, one below is not", T=4, scale=2e4, **HEAD),
        Case("nan", "a NaN spoils its own pair and no other", T=3, H=2, D=12, R=4, plant={1: NAN}),
        Case("inf", "an infinity spoils its pair, and no other", T=3, H=2, D=12, R=4, plant={2: INF, 11: -INF}),
        Case("llama", "the queries of an 8B model at 32k tokens", positions=True, **BIG),
        Case("interleaved_32k", "the same, pairs being neighbours", positions=True, layout="interleaved", **BIG),
        Case("by_index", "no positions are read", **BIG),
        Case("partial_32k", "half of each head passes through", positions=True, **BIG | {"R": 32}),
        Case("head_192", "a head of 192 features, no power of two", positions=True, **BIG | {"D": 192, "R": 96}),
    ],
)  # fmt: skip
