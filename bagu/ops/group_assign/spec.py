"""GroupViT's assignment: every token chooses a group, and a group is the mean of its tokens.

    z[b, t, g] = (scores[b, t, g] + noise) / tau            noise: Gumbel, as in gumbel_softmax, or none
    a[b, t]    = softmax over the groups of z[b, t], or with `hard` the one-hot of its largest, with the soft gradient
    y[b, g]    = sum_t a[b, t, g] values[b, t] / (sum_t a[b, t, g] + eps)

Attention normalises over the tokens that a query reads; here the softmax runs over the groups, so tokens compete for
nothing and groups compete for tokens. The noise of row b * T + t is that of gumbel_softmax with the same seed. If
several z are largest, the first group is chosen. A NaN in a token's scores spoils every group of its image.

Dims: B = images, T = tokens, G = groups, D = features.   Paper: https://arxiv.org/abs/2202.11094
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.gumbel_softmax.noise import words

MAX_GROUPS = 256  # of the Triton kernels: the groups of a token are one tile


class Args(NamedTuple):
    scores: torch.Tensor
    values: torch.Tensor
    tau: float
    hard: bool
    noise: bool
    seed: int
    eps: float


def reference(args: Args) -> torch.Tensor:
    """The definition. The harness runs it in fp64, and its autograd gives the true gradients."""
    z = args.scores
    if args.noise:
        u = (words(z, args.seed).double() + 0.5) / 2**32
        z = z - torch.log(-torch.log1p(-u).to(z.dtype))
    soft = torch.softmax(z / args.tau, -1)
    share = soft
    if args.hard:
        chosen = torch.arange(z.shape[-1], device=z.device) == z.argmax(-1, keepdim=True)
        share = chosen.to(soft.dtype) + (soft - soft.detach())
    return share.mT @ args.values / (share.sum(1).unsqueeze(2) + args.eps)


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    if not 0 < args["tau"] < 1e38:
        raise ArgumentError(f"group_assign: tau is {args['tau']}, expected a temperature above 0 and below 1e38")
    if not 0 <= args["seed"] < 2**63:
        raise ArgumentError(f"group_assign: seed is {args['seed']}, expected 0 to 2^63 - 1", hint="seed % 2**63")
    if not args["eps"] > 0:
        raise ArgumentError(f"group_assign: eps is {args['eps']}", hint="more than 0: a group may have no token")


def unsupported(args: Mapping[str, Any]) -> str | None:
    groups = args["scores"].shape[-1]
    return f"{groups} groups, and a tile holds {MAX_GROUPS}" if groups > MAX_GROUPS else None


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    B, T, G, D = (case[n] for n in "BTGD")
    scores = case.get("spread", 1.0) * streams.normal("scores", B, T, G)
    if "plant" in case.params:
        scores[0, T // 2, G // 2] = case["plant"]
    if case.get("dead", False):
        scores[..., 0] = -torch.inf
    return {
        "scores": scores,
        "values": streams.normal("values", B, T, D),
        "tau": case.get("tau", streams.choice("tau", 1.0, 1.7)),
        "hard": case.get("hard", True),
        "noise": case.get("noise", True),
        "seed": case.get("seed", 1),
        "eps": streams.choice("eps", 1.0, 0.3),
    }


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """The noise and the softmax (30 operations per score), a product; every tensor once."""
    B, T, G, D = (dims[d] for d in "BTGD")
    return Cost(flops=B * T * G * (30 + 2 * D), bytes=B * (T * G + T * D + G * D) * itemsize + 4 * B * G)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """The noise again, two products; scores, values, y and dy are read, two gradients written."""
    B, T, G, D = (dims[d] for d in "BTGD")
    return Cost(flops=B * T * G * (40 + 4 * D), bytes=B * (2 * T * G + 2 * T * D + 2 * G * D) * itemsize + 4 * B * G)


SPEC = OpSpec(
    name="group_assign",
    signature="scores[B, T, G], values[B, T, D], tau: float, hard: bool, noise: bool, seed: int, eps: float"
    " -> y[B, G, D]; mass[B, G]: acc",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    refuse=refuse,
    unsupported=unsupported,
    cost_backward=cost_backward,
    grads=("scores", "values"),
    saves=("scores", "values", "y", "mass"),
    ulps=4,
    independent=("D",),  # not B: the noise of a row depends on its number
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", B=2, T=16, G=16, D=16, seed=1),
        Case("ragged", "no size is a multiple of a block", B=2, T=37, G=7, D=21, seed=2),
        Case("soft", "the weights themselves, not their one-hot", B=2, T=24, G=8, D=20, hard=False, seed=3),
        Case("quiet", "evaluation: the hard choice without noise", B=2, T=24, G=8, D=20, noise=False),
        Case("quiet_soft", "a plain softmax over the groups", B=1, T=19, G=5, D=8, noise=False, hard=False),
        Case(
            "cold",
            "a low temperature makes the shares almost a one-hot",
            B=1,
            T=20,
            G=6,
            D=8,
            tau=0.2,
            hard=False,
            seed=4,
        ),
        Case("dead", "a group that no token can choose is 0", B=2, T=18, G=5, D=9, dead=True, seed=5),
        Case("dead_soft", "and its scores have no gradient", B=2, T=18, G=5, D=9, dead=True, hard=False, seed=5),
        Case("single", "one group takes every token: the mean", B=2, T=12, G=1, D=10, seed=6),
        Case("long", "several blocks of tokens", B=1, T=300, G=12, D=24, seed=7),
        Case("wide", "several blocks of features", B=1, T=40, G=9, D=200, seed=8),
        Case("many", "so many groups that tiles are smaller", B=1, T=40, G=70, D=40, seed=10),
        Case("loud", "exp overflows unless the maximum is taken off", B=1, T=9, G=6, D=8, spread=1e3, hard=False),
        Case("nan", "a NaN spoils its image and no other", B=2, T=11, G=4, D=8, plant=float("nan"), seed=9),
        Case("empty", "there is no image, and nothing is launched", B=0, T=8, G=4, D=8),
        Case("no_tokens", "an image without tokens has empty groups", B=2, T=0, G=4, D=8),
        Case("stage_1", "GroupViT: 196 patches into 64 groups", bench=True, B=256, T=196, G=64, D=384, seed=0),
        Case("stage_2", "GroupViT: then 64 groups into 8", bench=True, B=256, T=64, G=8, D=384, seed=0),
    ],
)
