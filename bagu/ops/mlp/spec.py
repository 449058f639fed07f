"""The feed-forward block of a transformer: a product, an activation or a gated one, a product.

    u = x upᵀ + up_bias      h = act(u), or act(x gateᵀ) * u with a gate      y = h downᵀ + down_bias

u, x gateᵀ and h are rounded to the dtype of x and kept for the backward. As separate calls a SwiGLU block is 14
autograd nodes, and with few rows their host time exceeds the GPU's; as one op it is one node with replayed launches.
Dims: M = rows (tokens), K = input features, N = features inside, D = output features.
Papers: https://arxiv.org/abs/1706.03762, 2002.05202 (gates)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.errors import UnknownName
from bagu.ops.activations import ACTIVATIONS, activate
from bagu.ops.call.many_rows import many_rows
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims


class Args(NamedTuple):
    x: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation: str


def reference(a: Args) -> torch.Tensor:
    """The definition."""
    u = a.x @ a.up.T
    u = u if a.up_bias is None else u + a.up_bias
    h = activate(u, a.activation) if a.gate is None else activate(a.x @ a.gate.T, a.activation) * u
    y = h @ a.down.T
    return y if a.down_bias is None else y + a.down_bias


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    if args["activation"] not in ACTIVATIONS:
        raise UnknownName.among("activation of mlp", args["activation"], ACTIVATIONS)


def derive(args: Mapping[str, Any], dims: Dims) -> Dims:
    """The shape of u, which is kept beside a gate only."""
    return {"U": (0,) if args["gate"] is None else (*dims["M"], dims["N"])}


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lead, K, N, D = case.get("lead", (case.get("M", 1),)), case["K"], case["N"], case["D"]
    x = case.get("scale", 1.0) * streams.normal("x", *lead, K)
    if "plant" in case.params:
        x[0, K // 2] = case["plant"]
    gated, bias = case.get("gated", False), case.get("bias", False)
    return {
        "x": x,
        "up": K**-0.5 * streams.normal("up", N, K),
        "down": N**-0.5 * streams.normal("down", D, N),
        "gate": K**-0.5 * streams.normal("gate", N, K) if gated else None,
        "up_bias": streams.normal("up_bias", N) if bias else None,
        "down_bias": streams.normal("down_bias", D) if bias else None,
        "activation": case.get("activation", "silu" if gated else "gelu"),
    }


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Without a gate: two GEMMs; x and the weights are read once, u, h and y are written once."""
    M, K, N, D = (dims[d] for d in "MKND")
    return Cost(flops=2 * M * N * (K + D), bytes=(M * (K + 2 * N + D) + N * (K + D)) * itemsize)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Four GEMMs; every saved tensor and dy are read once, every gradient is written once."""
    M, K, N, D = (dims[d] for d in "MKND")
    return Cost(flops=4 * M * N * (K + D), bytes=(M * (2 * K + 2 * N + D) + 2 * N * (K + D)) * itemsize)


SPEC = OpSpec(
    name="mlp",
    signature="x[*M, K], up[N, K], down[D, N], gate[N, K]?, up_bias[N]?, down_bias[D]?, activation: str"
    " -> y[*M, D]; z[*M, N], u[*U], h[*M, N]",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("x", "up", "down", "gate", "up_bias", "down_bias"),
    saves=("x", "up", "down", "gate", "up_bias", "down_bias", "z", "u", "h"),
    refuse=refuse,
    derive=derive,
    ulps=2,  # u and h are rounded before the products that read them, and so are their gradients; 1.7 measured
    ulps_of={"dgate": 4},  # sums of products of three rounded factors; 3.3 measured
    nonempty=("K", "N"),  # no tile of an empty dw has a program that could sum the gradient of the bias
    independent=("M",),
    peers=True,
    prefer_torch=(many_rows("up", runs="cuBLAS, with torch's activation or the kernel of `swiglu`"),),
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", M=8, K=32, N=64, D=16),
        Case("ragged", "no side is a multiple of a block, so every mask is used", M=5, K=37, N=41, D=23, bias=True),
        Case("gated", "a SwiGLU, the block of a Llama", M=8, K=32, N=64, D=16, gated=True),
        Case("gated_ragged", "the same with masks and a bias of the second factor", M=5, K=37, N=41, D=23, gated=True,
             bias=True),
        Case("geglu", "the activation of the gate is a gelu", M=6, K=16, N=24, D=8, gated=True, activation="gelu_tanh"),
        Case("relu", "negative sums are zeros, and so are their gradients", M=6, K=16, N=24, D=8, activation="relu",
             bias=True),
        Case("batched", "the leading dims are several, and are folded into rows", lead=(2, 3), K=24, N=40, D=24),
        Case("single", "there is no leading dim at all: one row", lead=(), K=24, N=17, D=9, gated=True),
        Case("tiles", "several tiles of every product, the last ones partial", M=70, K=144, N=136, D=80, bias=True),
        Case("loud", "a gate past exp's largest argument is a step, and its slope is 0", M=4, K=32, N=24, D=8,
             scale=60.0, gated=True),
        Case("frozen", "no weight has a gradient, as beside LoRA", M=6, K=16, N=24, D=8, bias=True,
             frozen=["up", "down", "up_bias", "down_bias"]),
        Case("biases", "only biases have gradients: the kernel of dw adds them", M=6, K=16, N=24, D=8, bias=True,
             frozen=["up", "down"]),
        Case("first", "the input has no gradient, as in a first layer", M=6, K=16, N=24, D=8, gated=True,
             frozen=["x"]),
        Case("nan", "a NaN spoils its own row and no other", M=4, K=16, N=24, D=9, plant=float("nan")),
        Case("empty", "there is no row, and nothing is launched", M=0, K=16, N=24, D=9, gated=True),
        Case("bert", "1k tokens in a large BERT: the host's time counts", bench=True, M=1024, K=1024, N=4096, D=1024,
             bias=True),
        Case("few", "1k tokens in a small Llama", bench=True, M=1024, K=1024, N=2688, D=1024, gated=True),
    ],
)  # fmt: skip
