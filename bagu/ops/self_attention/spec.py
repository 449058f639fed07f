"""The attention block of a transformer: queries, keys and values by one product, attention, a product of its result.

    [q | k | v] = x w_inᵀ + b_in        y = attention(q, k, v) w_outᵀ + b_out

of sequences of one length, without a mask or causal; the scale of scores is 1 / sqrt(N / heads). q, k, v and the result
of the attention are rounded to the dtype of x and kept for the backward, as is `lse` (see `attention`).
Dims: B = sequences, S = tokens of each, K = input features, N = features of all heads, D = output features.
Paper: https://arxiv.org/abs/1706.03762
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.ops.attention.block_sizes import WIDEST
from bagu.ops.call.many_rows import many_rows
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims


class Args(NamedTuple):
    x: torch.Tensor
    w_in: torch.Tensor
    w_out: torch.Tensor
    b_in: torch.Tensor | None
    b_out: torch.Tensor | None
    heads: int
    causal: bool


def reference(a: Args) -> torch.Tensor:
    """The definition."""
    w_out = a.w_out
    B, S, _ = a.x.shape
    qkv = a.x @ a.w_in.T
    qkv = qkv if a.b_in is None else qkv + a.b_in
    q, k, v = (t.transpose(1, 2) for t in qkv.view(B, S, 3, a.heads, w_out.shape[1] // a.heads).unbind(2))
    scores = q @ k.mT * (w_out.shape[1] // a.heads) ** -0.5
    if a.causal:
        scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool, device=a.x.device).triu(1), -torch.inf)
    y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, S, w_out.shape[1]) @ w_out.T
    return y if a.b_out is None else y + a.b_out


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    if args["heads"] < 1 or dims["N"] % args["heads"]:
        raise ArgumentError(
            f"self_attention: heads is {args['heads']}, and w_out has {dims['N']} columns",
            hint="heads of one size divide the columns",
        )


def unsupported(args: Mapping[str, Any]) -> str | None:
    wide = args["w_out"].shape[1] // args["heads"]
    return f"its tiles have room for heads of {WIDEST} features, and here is one of {wide}" if wide > WIDEST else None


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    B, S, K, N, D = (case[d] for d in "BSKND")
    bias = case.get("bias", False)
    return {
        "x": streams.normal("x", B, S, K),
        "w_in": K**-0.5 * streams.normal("w_in", 3 * N, K),
        "w_out": N**-0.5 * streams.normal("w_out", D, N),
        "b_in": streams.normal("b_in", 3 * N) if bias else None,
        "b_out": streams.normal("b_out", D) if bias else None,
        "heads": case["H"],
        "causal": case.get("causal", False),
    }


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Two GEMMs and attention; x and the weights are read once, q, k, v, its result and y are written once."""
    B, S, K, N, D = (dims[d] for d in "BSKND")
    T, pairs = B * S, B * S * (S + 1) // 2 if dims["causal"] else B * S * S
    return Cost(flops=2 * T * N * (3 * K + D) + 4 * pairs * N, bytes=(T * (K + 4 * N + D) + N * (3 * K + D)) * itemsize)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Four GEMMs and attention's five; every saved tensor and dy are read once, every gradient is written once."""
    B, S, K, N, D = (dims[d] for d in "BSKND")
    T, pairs = B * S, B * S * (S + 1) // 2 if dims["causal"] else B * S * S
    return Cost(
        flops=4 * T * N * (3 * K + D) + 10 * pairs * N,
        bytes=(T * (2 * K + 4 * N + D) + 2 * N * (3 * K + D)) * itemsize,
    )


SPEC = OpSpec(
    name="self_attention",
    signature="x[B, S, K], w_in[3*N, K], w_out[D, N], b_in[3*N]?, b_out[D]?, heads: int, causal: bool"
    " -> y[B, S, D]; qkv[B, S, 3*N], mixed[B, S, N], lse[B, S, heads]: acc",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("x", "w_in", "w_out", "b_in", "b_out"),
    saves=("x", "w_in", "w_out", "b_in", "b_out", "qkv", "mixed", "lse"),
    refuse=refuse,
    nonempty=("K", "N"),
    unsupported=unsupported,
    ulps=2,  # q, k, v and the weights of the values are rounded before the products that read them; 1.3 measured
    # after three more roundings; 2.7, 4.5 (x86, in bf16) and 2.6 measured
    ulps_of={"dx": 4, "dw_in": 6, "db_in": 4},
    independent=("B",),
    prefer_torch=(many_rows("w_in", runs="cuBLAS and cuDNN"),),
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", B=2, S=4, K=16, N=16, D=16, H=2),
        Case("ragged", "no side is a multiple of a block", B=2, S=5, K=21, N=24, D=11, H=3, bias=True),
        Case("causal", "a token sees those before it", B=2, S=6, K=16, N=16, D=16, H=2, bias=True, causal=True),
        Case("one", "one sequence, longer than a block of queries", B=1, S=70, K=16, N=16, D=16, H=1),
        Case("tokens", "sequences of one token: their weight is 1", B=3, S=1, K=16, N=16, D=16, H=2, bias=True),
        Case("frozen", "no weight has a gradient, as beside LoRA", B=2, S=4, K=16, N=16, D=16, H=2, bias=True,
             frozen=["w_in", "w_out", "b_in", "b_out"]),
        Case("first", "the input has no gradient", B=2, S=4, K=16, N=16, D=16, H=2, frozen=["x"]),
        Case("empty", "there is no sequence, and nothing is launched", B=0, S=4, K=16, N=16, D=16, H=2),
        Case("few", "1k tokens in a large BERT: the host's time counts", bench=True, B=1, S=1024, K=1024, N=1024,
             D=1024, H=16, bias=True),
    ],
)  # fmt: skip
