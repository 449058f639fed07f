"""A write to a paged cache: each new token's keys (or values) go to the slot that its sequence assigns.

    cache[slots[t] // B, slots[t] % B] = x[t]

The cache has N blocks of B slots. A sequence owns whole blocks, in any order, and its block table lists them. Slots
that are not in `slots` keep their content. The op returns nothing and changes `cache` in place. There are no gradients.

Dims: N = blocks, B = slots per block, T = new tokens, G = key heads, D = head dim.
Paper: https://arxiv.org/abs/2309.06180 (PagedAttention)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.ops.core import Case, Cost, OpSpec, Streams
from bagu.ops.kv_write import torch_backend
from bagu.ops.signature import Dims
from bagu.ops.values import check_range


def reference(cache: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> tuple[()]:
    """The definition, one token after another."""
    B, G, D = cache.shape[1:]
    for row, slot in zip(x.reshape(-1, G, D), slots.flatten().tolist(), strict=True):
        cache[slot // B, slot % B] = row
    return ()


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    N, B, G, D = (case[n] for n in "NBGD")
    lead = case.get("lead", (case.get("T", 1),))
    count = int(torch.tensor(lead).prod())
    slots = torch.randperm(N * B, generator=torch.Generator().manual_seed(1))[:count]
    if case.get("row", False):
        slots = torch.arange(count) + case.get("first", 0)
    return {
        "cache": streams.normal("cache", N, B, G, D),
        "x": streams.normal("x", *lead, G, D),
        "slots": slots.view(lead),
    }


def check_values(args: Mapping[str, Any], dims: Dims) -> None:
    check_range("kv_write", "slots", args["slots"], dims["N"] * dims["B"], "the cache")


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """No arithmetic. Every new row is read once and written once, and its slot is read."""
    T, G, D = dims["T"], dims["G"], dims["D"]
    return Cost(flops=0, bytes=2 * T * G * D * itemsize + 8 * T)


SPEC = OpSpec(
    name="kv_write",
    signature="cache[N, B, G, D], x[*T, G, D], slots[*T]: i64 ->",
    mutates=("cache",),
    reference=reference,
    torch_backend=torch_backend,
    inputs=inputs,
    cost=cost,
    check_values=check_values,
    ulps=0,  # values are copied, not computed
    nonempty=("N", "B", "G", "D"),
    independent=("G", "D"),
    backends=("torch",),
    cases=[
        Case("even", "few tokens into blocks of four, in no order", N=4, B=4, T=6, G=2, D=8),
        Case("ragged", "no size is a power of two", N=5, B=3, T=7, G=3, D=5),
        Case("full", "every place of the cache is written", N=3, B=4, T=12, G=1, D=4),
        Case("prompt", "neighbouring slots run over the end of a block", N=4, B=4, T=9, G=2, D=8, row=True, first=3),
        Case("one", "one new token: its neighbours keep what they hold", N=4, B=16, T=1, G=2, D=8),
        Case("batched", "the tokens have two dims, as a decode of several at a time has", N=4, B=4, lead=(3, 2), G=2,
             D=8),
        Case("latent", "MLA's one wide head, the latent of a token", N=3, B=8, T=5, G=1, D=72),
        Case("decode", "one token of 256 requests to an 8B model", N=4096, B=16, T=256, G=8, D=128, bench=True),
        Case("prefill", "a prompt of 8k tokens to an 8B model", N=4096, B=16, T=8192, G=8, D=128, bench=True),
    ],
)  # fmt: skip
