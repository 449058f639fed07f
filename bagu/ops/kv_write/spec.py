"""A write to a paged cache: each new token's keys (or values) go to the slot that its sequence assigns.

    cache[slots[t] // B, slots[t] % B] = x[t]

    with a scale:    scale[slots[t] // B, slots[t] % B, g] = max |x[t, g]| / L        L = 127 for int8, 448 for fp8
                     cache[slots[t] // B, slots[t] % B, g] = round(x[t, g] / scale)   (quantize.py)

The cache has N blocks of B slots. A sequence owns whole blocks, in any order, and its block table lists them. Slots
that are not in `slots` keep their content. The op returns nothing and changes `cache` and `scale` in place. There are
no gradients.

Dims: N = blocks, B = slots per block, T = new tokens, G = key heads, D = head dim.
Paper: https://arxiv.org/abs/2309.06180 (PagedAttention)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.contract.values import check_range
from bagu.ops.kv_write.quantize import check_cache, quantize

INF, NAN = float("inf"), float("nan")


def reference(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None) -> tuple[()]:
    """The definition, one token after another. A check passes an fp8 cache in fp64, which keeps q unrounded."""
    B, G, D = cache.shape[1:]
    for row, slot in zip(x.reshape(-1, G, D), slots.flatten().tolist(), strict=True):
        at = slot // B, slot % B
        if scale is not None:
            largest = 127.0 if cache.dtype == torch.int8 else 448.0
            steps = row.abs().amax(-1, keepdim=True) / largest
            steps = torch.where(steps < 2.0**-126, 0.0, steps)
            row = torch.where((steps > 0) & steps.isfinite(), row / steps, 0.0)
            row = row.round() if cache.dtype == torch.int8 else row
            scale[at] = steps.squeeze(-1)
        cache[at] = row.to(cache.dtype)
    return ()


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    N, B, G, D = (case[n] for n in "NBGD")
    lead = case.get("lead", (case.get("T", 1),))
    count = int(torch.tensor(lead).prod())
    slots = torch.randperm(N * B, generator=torch.Generator().manual_seed(1))[:count]
    if case.get("row", False):
        slots = torch.arange(count) + case.get("first", 0)
    x = streams.normal("x", *lead, G, D) * case.get("size", 1.0)
    if "plant" in case.params:
        x[0, 1, D // 2] = case["plant"]
    cache, scale = filled(streams, "cache", (N, B, G, D), case.get("dtype", None))
    return {"x": x, "slots": slots.view(lead), "cache": cache, "scale": scale}


def filled(
    streams: Streams, name: str, shape: tuple[int, ...], dtype: str | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A cache with random content and its scales, for a case: `dtype` is "int8", "fp8", or None for the tokens'."""
    values = streams.normal(name, *shape)
    if dtype is None:
        return values, None
    q, scale = quantize(values, torch.int8 if dtype == "int8" else torch.float8_e4m3fn)
    return q, scale.double()


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    check_cache("kv_write", "cache", args["cache"], args["scale"], args["x"].dtype)


def check_values(args: Mapping[str, Any], dims: Dims) -> None:
    check_range("kv_write", "slots", args["slots"], dims["N"] * dims["B"], "the cache")


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """No arithmetic without scales. Every new row is read once and written once, and its slot is read."""
    T, G, D = dims["T"], dims["G"], dims["D"]
    return Cost(flops=0, bytes=2 * T * G * D * itemsize + 8 * T)


SPEC = OpSpec(
    name="kv_write",
    signature="x[*T, G, D], slots[*T]: i64, cache[N, B, G, D]: any, scale[N, B, G]?: acc ->",
    mutates=("cache", "scale"),
    reference=reference,
    inputs=inputs,
    cost=cost,
    refuse=refuse,
    check_values=check_values,
    ulps=0.5,  # values are copied, or rounded once
    ulps_of={"scale afterwards": 1},
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
        Case("int8", "a scale for each token and head", N=4, B=4, T=6, G=2, D=9, dtype="int8"),
        Case("int8_batched", "the same where the tokens have two dims", N=4, B=4, lead=(3, 2), G=2, D=8, dtype="int8",
             size=30.0),
        Case("int8_zero", "a row of zeros has scale 0, without 0 / 0", N=4, B=4, T=3, G=2, D=8, dtype="int8", size=0.0),
        Case("int8_nan", "a NaN makes the scale of its own head NaN, and no other", N=4, B=4, T=3, G=2, D=8,
             dtype="int8", plant=NAN),
        Case("int8_inf", "the same with an infinity", N=4, B=4, T=3, G=2, D=8, dtype="int8", plant=-INF),
        Case("fp8", "three bits of mantissa, and 448 for the largest number", N=4, B=4, T=6, G=2, D=16, dtype="fp8"),
        Case("decode", "one token of 256 requests to an 8B model", N=4096, B=16, T=256, G=8, D=128, bench=True),
        Case("prefill", "a prompt of 8k tokens to an 8B model", N=4096, B=16, T=8192, G=8, D=128, bench=True),
    ],
)  # fmt: skip
