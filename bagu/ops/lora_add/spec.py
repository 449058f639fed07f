"""LoRA adapters of a batch in which every token may have another one: a low-rank product is added to y.

    y[t, n] += sum_r b[l, n, r] * sum_k a[l, r, k] * x[t, k]        l = slots[t]

A token whose slot is not in [0, L) has no adapter, and its row of y is not changed. Both sums are in fp32 (fp64 for
fp64); the inner one may be rounded to the dtype of x, and y is rounded once. There are no gradients.
Dims: T = tokens, K = input features, N = output features, L = slots, R = rank.
Papers: https://arxiv.org/abs/2106.09685 (LoRA), https://arxiv.org/abs/2310.18547 (Punica: many adapters in a batch)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.ops.contract.core import Case, Cost, OpSpec, Streams


class Args(NamedTuple):
    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    slots: torch.Tensor
    y: torch.Tensor


def reference(args: Args) -> tuple[()]:
    """The definition, one token after another."""
    for t, slot in enumerate(args.slots.tolist()):
        if 0 <= slot < len(args.a):
            args.y[t] += args.b[slot] @ (args.a[slot] @ args.x[t])
    return ()


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    T, K, N, L, R = (case[n] for n in "TKNLR")
    slots = streams.integers("slots", -1, L, T)
    if "runs" in case.params:  # as in a prompt, neighbours have the same adapter
        slots = streams.integers("slots", -1, L, -(-T // case["runs"])).repeat_interleave(case["runs"])[:T]
    x = streams.normal("x", T, K)
    if "plant" in case.params:
        x[0, K // 2], slots[0] = case["plant"], L - 1
    return {
        "x": x,
        "a": K**-0.5 * streams.normal("a", L, R, K),
        "b": R**-0.5 * streams.normal("b", L, N, R),
        "slots": slots if case.get("adapters", True) else slots.clamp(max=-1),
        "y": streams.normal("y", T, N),
    }


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Both products of each token; x, y and the pairs that tokens have, at most one each, are read once."""
    T, K, N, R = (dims[d] for d in "TKNR")
    pairs = min(dims["L"], T) * R * (K + N)
    return Cost(flops=2 * T * R * (K + N), bytes=(T * (K + 2 * N) + pairs) * itemsize + 8 * T)


SPEC = OpSpec(
    name="lora_add",
    signature="x[T, K], a[L, R, K], b[L, N, R], slots[T]: i64, y[T, N] ->",
    mutates=("y",),
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    ulps=2,  # A x is rounded between the products
    independent=("T", "N"),
    cases=[
        Case("even", "powers of two need no masks, so a failure here is the math", T=16, K=32, N=32, L=2, R=16),
        Case("ragged", "no size is a multiple of a block, so every mask is used", T=7, K=37, N=23, L=3, R=5),
        Case("none", "no token has an adapter: y keeps its values", T=5, K=16, N=9, L=2, R=4, adapters=False),
        Case("one", "one token of one adapter", T=1, K=40, N=24, L=1, R=8, plant=1.0),
        Case("deep", "a sum over several blocks of inputs", T=4, K=1100, N=9, L=2, R=3),
        Case("wide", "several blocks of outputs", T=6, K=20, N=600, L=2, R=6),
        Case("wide_tall", "several blocks of outputs for each program", T=270, K=300, N=200, L=2, R=6),
        Case("split", "the outputs of a tile are divided among programs", T=270, K=20, N=200, L=2, R=6, sms=80),
        Case("tall", "many tokens, with adapters in no order", T=300, K=24, N=40, L=3, R=6),
        Case("prompts", "the same in runs of tokens with one adapter", T=300, K=24, N=40, L=3, R=6, runs=40),
        Case("fused", "the rank of three adapters in one, as qkv has it", T=5, K=48, N=40, L=2, R=48),
        Case("rank_one", "the smallest rank there is", T=4, K=16, N=16, L=2, R=1),
        Case("nan", "a NaN spoils its own row and no other", T=9, K=32, N=17, L=2, R=4, plant=float("nan")),
        Case("inf", "an infinity spoils its own row and no other", T=9, K=32, N=17, L=2, R=4, plant=float("inf")),
        Case("inf_tall", "the same in a tile of tokens", T=260, K=32, N=17, L=2, R=4, plant=float("inf")),
        Case("empty", "there is no token, and nothing is launched", T=0, K=16, N=9, L=2, R=4),
        Case("decode_qkv", "a token of 32 requests with 8 adapters, qkv of a 0.6B model", bench=True, T=32, K=1024,
             N=4096, L=8, R=16),
        Case("decode_down", "the same in its down projection", bench=True, T=32, K=3072, N=1024, L=8, R=16),
        Case("prefill", "eight prompts of 1,024 tokens", bench=True, T=8192, K=1024, N=6144, L=8, R=16, runs=1024),
    ],
)  # fmt: skip
