"""A linear layer with LoRA adapters, of a batch in which every token may have another one.

    y[t, n] = sum_k w[n, k] * x[t, k] + bias[n] + sum_r b[l, n, r] * sum_k a[l, r, k] * x[t, k]        l = slots[t]

A token whose slot is not in [0, L) has no adapter. All sums are in fp32 (fp64 for fp64), and y is rounded once. It is
for decoding, where each launch counts: `lora_add` reads x again and waits for the layer's output. With many tokens most
of A x would be of other tokens' adapters. There are no gradients.
Dims: T = tokens, K = input features, N = output features, L = slots, R = rank.
Papers: https://arxiv.org/abs/2106.09685 (LoRA), https://arxiv.org/abs/2310.18547 (Punica: many adapters in a batch)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.lora_add import spec as lora_add


class Args(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    slots: torch.Tensor
    bias: torch.Tensor | None


def reference(args: Args) -> torch.Tensor:
    """The definition."""
    y = args.x @ args.w.mT if args.bias is None else args.x @ args.w.mT + args.bias
    lora_add.reference(lora_add.Args(args.x, args.a, args.b, args.slots, y))
    return y


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    given = lora_add.inputs(case, streams)
    N, K = case["N"], case["K"]
    return {
        "x": given["x"],
        "w": K**-0.5 * streams.normal("w", N, K),
        **{name: given[name] for name in ("a", "b", "slots")},
        "bias": streams.normal("bias", N) if case.get("bias", False) else None,
    }


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """The products of each token; x, w and the pairs that tokens have, at most one each, are read once."""
    T, K, N, R = (dims[d] for d in "TKNR")
    pairs = min(dims["L"], T) * R * (K + N)
    return Cost(flops=2 * T * (N * K + R * (K + N)), bytes=(T * (K + N) + N * K + pairs) * itemsize + 8 * T)


SPEC = OpSpec(
    name="lora_linear",
    signature="x[T, K], w[N, K], a[L, R, K], b[L, N, R], slots[T]: i64, bias[N]? -> y[T, N]",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    ulps=1,
    independent=("T", "N"),
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", T=16, K=32, N=32, L=2, R=16),
        Case("ragged", "no size is a multiple of a block, so every mask is used", T=7, K=37, N=23, L=3, R=5, bias=True),
        Case("none", "no token has an adapter", T=5, K=16, N=9, L=2, R=4, adapters=False, bias=True),
        Case("one", "one token of one adapter", T=1, K=40, N=24, L=1, R=8, plant=1.0),
        Case("deep", "a sum over several blocks of inputs", T=4, K=1100, N=9, L=2, R=3, bias=True),
        Case("split", "the inputs are divided among programs", T=4, K=2100, N=40, L=2, R=3, sms=80, bias=True),
        Case("wide", "several blocks of outputs", T=6, K=20, N=600, L=2, R=6),
        Case("tall", "several tiles of tokens, with adapters in no order", T=70, K=24, N=40, L=3, R=6),
        Case("many", "more rows of A than of w, most of them of no token's slot", T=5, K=40, N=24, L=40, R=6),
        Case("fused", "the rank of three adapters in one, as qkv has it", T=5, K=48, N=40, L=2, R=48),
        Case("rank_one", "the smallest rank there is, in the last row of a tile of A", T=1, K=16, N=16, L=32, R=1,
             plant=1.0),
        Case("nan", "a NaN spoils its own row and no other", T=9, K=32, N=17, L=2, R=4, plant=float("nan")),
        Case("inf", "an infinity spoils its own row and no other", T=9, K=32, N=17, L=2, R=4, plant=float("inf")),
        Case("empty", "there is no token, and nothing is launched", T=0, K=16, N=9, L=2, R=4),
        Case("decode_qkv", "a token of 32 requests with 8 adapters, qkv of a 0.6B model", bench=True, T=32, K=1024,
             N=4096, L=8, R=16),
        Case("decode_down", "the same in its down projection", bench=True, T=32, K=3072, N=1024, L=8, R=16),
    ],
)  # fmt: skip
