"""A layer of a transformer encoder: attention and a feed-forward block, each with a residual and a LayerNorm.

    s = norm1(x + self_attention(x))    y = norm2(s + mlp(s))         or, with norm_first,
    s = x + self_attention(norm1(x))    y = s + mlp(norm2(s))

of sequences of one length, without a mask. Every intermediate result is rounded to the dtype of x. As separate calls
the layer is 25 autograd nodes, and with few rows their host time exceeds the GPU's; as one op it is one node with
replayed launches.
Dims: B = sequences, S = tokens of each, K = features, N = features inside the feed-forward block.
Papers: https://arxiv.org/abs/1706.03762, 2002.04745 (norm_first)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from bagu.errors import ArgumentError, UnknownName
from bagu.ops.activations import ACTIVATIONS
from bagu.ops.call.many_rows import many_rows
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.mlp import spec as mlp
from bagu.ops.self_attention import spec as self_attention


class Args(NamedTuple):
    x: torch.Tensor
    w_in: torch.Tensor
    b_in: torch.Tensor
    w_out: torch.Tensor
    b_out: torch.Tensor
    up: torch.Tensor
    up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor
    norm1: torch.Tensor
    norm1_bias: torch.Tensor
    norm2: torch.Tensor
    norm2_bias: torch.Tensor
    heads: int
    activation: str
    norm_first: bool
    eps: float


def attention(a: Args, x: torch.Tensor) -> self_attention.Args:
    """The attention block of the layer, on x."""
    return self_attention.Args(x, a.w_in, a.w_out, a.b_in, a.b_out, a.heads, False)


def feed_forward(a: Args, x: torch.Tensor) -> mlp.Args:
    """The feed-forward block of the layer, on x."""
    return mlp.Args(x, a.up, a.down, None, a.up_bias, a.down_bias, a.activation)


def reference(a: Args) -> torch.Tensor:
    """The definition."""

    def attend(n: torch.Tensor) -> torch.Tensor:
        return self_attention.reference(attention(a, n))

    def feed(n: torch.Tensor) -> torch.Tensor:
        return mlp.reference(feed_forward(a, n))

    def first(s: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(s, s.shape[-1:], a.norm1, a.norm1_bias, a.eps)

    def second(s: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(s, s.shape[-1:], a.norm2, a.norm2_bias, a.eps)

    if a.norm_first:
        s = a.x + attend(first(a.x))
        return s + feed(second(s))
    s = first(a.x + attend(a.x))
    return second(s + feed(s))


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    if args["heads"] < 1 or dims["K"] % args["heads"]:
        raise ArgumentError(
            f"encoder_layer: heads is {args['heads']}, and there are {dims['K']} features",
            hint="heads of one size divide the features",
        )
    if args["activation"] not in ACTIVATIONS:
        raise UnknownName.among("activation of encoder_layer", args["activation"], ACTIVATIONS)


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    B, S, K, N = (case[d] for d in "BSKN")
    shapes = {"w_in": (3 * K, K), "w_out": (K, K), "up": (N, K), "down": (K, N)}
    weights = {name: shape[1] ** -0.5 * streams.normal(name, *shape) for name, shape in shapes.items()}
    biases = {"b_in": 3 * K, "b_out": K, "up_bias": N, "down_bias": K, "norm1_bias": K, "norm2_bias": K}
    norms = {name: 1 + 0.5 * streams.normal(name, K) for name in ("norm1", "norm2")}
    return {
        "x": streams.normal("x", B, S, K),
        **weights,
        **{name: streams.normal(name, size) for name, size in biases.items()},
        **norms,
        "heads": case["H"],
        "activation": case.get("activation", "gelu"),
        "norm_first": case.get("norm_first", False),
        "eps": case.get("eps", 1e-5),
    }


def _sum(dims: Mapping[str, int], itemsize: int, costs: str, norm_bytes: int) -> Cost:
    M, K = dims["B"] * dims["S"], dims["K"]
    blocks = (
        getattr(self_attention, costs)({**dims, "N": K, "D": K, "causal": False}, itemsize),
        getattr(mlp, costs)({"M": M, "K": K, "N": dims["N"], "D": K}, itemsize),
    )
    return Cost(
        flops=sum(c.flops for c in blocks) + 16 * M * K, bytes=sum(c.bytes for c in blocks) + norm_bytes * M * K
    )


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """The blocks'; a norm reads two tensors and writes two."""
    return _sum(dims, itemsize, "cost", 8 * itemsize)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """The blocks'; a norm's backward reads two tensors and writes one."""
    return _sum(dims, itemsize, "cost_backward", 6 * itemsize)


def unsupported(args: Mapping[str, Any]) -> str | None:
    return self_attention.unsupported(args)


GRADS = Args._fields[:13]  # all tensors
KEPT = (
    "qkv[B, S, 3*K], mixed[B, S, K], lse[B, S, heads]: acc, one[B, S, K], two[B, S, K],"
    " three[B, S, K], z[B, S, N], h[B, S, N], mean1[B, S]: acc, r1[B, S]: acc, mean2[B, S]: acc, r2[B, S]: acc"
)

SPEC = OpSpec(
    name="encoder_layer",
    signature="x[B, S, K], w_in[3*K, K], b_in[3*K], w_out[K, K], b_out[K], up[N, K], up_bias[N], down[K, N],"
    " down_bias[K], norm1[K], norm1_bias[K], norm2[K], norm2_bias[K], heads: int, activation: str, norm_first: bool,"
    f" eps: float -> y[B, S, K]; {KEPT}",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=GRADS,
    saves=(*GRADS, "qkv", "mixed", "lse", "one", "two", "three", "z", "h", "mean1", "r1", "mean2", "r2"),
    refuse=refuse,
    nonempty=("K", "N"),
    unsupported=unsupported,
    ulps=4,  # the roundings of both blocks, of their residuals and norms; 3.0 measured
    ulps_of={"dw_in": 7},  # 5.2 measured
    independent=("B",),
    prefer_torch=(many_rows("up", runs="cuBLAS and cuDNN"),),
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", B=2, S=4, K=16, N=32, H=2),
        Case("before", "the norms are applied before the blocks", B=2, S=4, K=16, N=32, H=2, norm_first=True),
        Case("ragged", "no side is a multiple of a block", B=2, S=5, K=24, N=41, H=3, activation="relu", eps=0.1),
        Case("ragged_before", "the same with norms before", B=3, S=5, K=24, N=41, H=3, norm_first=True),
        Case("frozen", "no weight has a gradient, as beside LoRA", B=2, S=4, K=16, N=32, H=2, frozen=list(GRADS[1:])),
        Case("empty", "there is no sequence, and nothing is launched", B=0, S=4, K=16, N=32, H=2),
        Case(
            "bert", "a large BERT on 1k tokens: the host's time counts", bench=True, B=1, S=1024, K=1024, N=4096, H=16
        ),
    ],
)
