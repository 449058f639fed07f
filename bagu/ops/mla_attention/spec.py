"""Attention over a paged cache of latents: multi-head latent attention (MLA) in its absorbed form.

    position j of sequence s    row = cache[block_tables[s, j // B], j % B]; key = row, value = row[:rank]
    s[i, j] = scale * q[i] . row[j]
    lse[i]  = log(sum_j exp(s[i, j]))        out[i] = sum_j exp(s[i, j] - lse[i]) * row[j, :rank]

for each head, over the positions j <= i (with i - j < window if there is one) of the query's own sequence. It is
`paged_attention` with one key head for all query heads, whose value is the beginning of its key, so a kernel reads the
cache once for both. A row is a token's latent of `rank` features and its rotated key; the query of a head is
[q_nope W_uk, q_rope], and the caller multiplies `out` by W_uv. Plans, tables and lse are as in `paged_attention`.
There are no gradients.

Dims: T = new tokens, H = query heads, D = features of a row, N = blocks, B = positions per block, S = sequences,
S1 = S + 1, W = the table's width.
Paper: https://arxiv.org/abs/2405.04434 (DeepSeek-V2), 2.1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.paged_attention import spec as paged

WIDEST = 512, 128  # the most features of a latent and of a rotated key that a tile of the Triton kernel can hold


class Args(NamedTuple):
    q: torch.Tensor
    cache: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens: torch.Tensor
    context_lens: torch.Tensor
    rank: int
    max_len: int
    max_context: int
    window: int | None
    scale: float | None


def as_paged(a: Args) -> paged.Args:
    """The call of paged attention that computes this: one key head, whose values are a view of the keys."""
    keys = a.cache.unsqueeze(2)
    return paged.Args(
        a.q, keys, keys[..., : a.rank], a.block_tables, a.cu_seqlens, a.context_lens, slopes=None, bias=None,
        sinks=None, k_scale=None, v_scale=None, max_len=a.max_len, max_context=a.max_context, window=a.window,
        scale=a.scale,
    )  # fmt: skip


def reference(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    return paged.reference(as_paged(a))


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    """As in paged_attention: `plan` has (past, new) of each sequence. `rope` is the size of a row's rotated key."""
    given = paged.inputs(case.replace(G=1, D=case["rank"] + case["rope"], E=case["rank"], latent=True), streams)
    names = ("q", "block_tables", "cu_seqlens", "context_lens", "max_len", "max_context", "window", "scale")
    return {"cache": given["k_cache"].squeeze(2), "rank": case["rank"], **{n: given[n] for n in names}}


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    if not 1 <= args["rank"] <= dims["D"]:
        raise ArgumentError(
            f"mla_attention: rank is {args['rank']}, and a row of the cache has {dims['D']} features",
            hint="rank is the number of leading features that are the value: 1 to D",
        )
    paged.refuse_plan("mla_attention", args, dims)


def check_values(args: Mapping[str, Any], dims: Dims) -> None:
    """Check the offsets, and that the block table entries which queries attend to are blocks of the pool."""
    paged.check_plan("mla_attention", args, dims)


def unsupported(args: Mapping[str, Any]) -> str | None:
    """The reason the Triton kernel cannot run a call; None if it can."""
    rank, rotated = args["rank"], args["q"].shape[-1] - args["rank"]
    if rank > WIDEST[0] or rotated > WIDEST[1]:
        return (
            f"its tiles have room for a rank of {WIDEST[0]} and {WIDEST[1]} rotated features, and here are {rank} and"
            f" {rotated}"
        )
    return None


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Assumes that every sequence has max_context: two products per pair and head; a row of the cache is read once."""
    T, H, D, E, S, C = (dims[n] for n in ("T", "H", "D", "rank", "S", "max_context"))
    new = T / max(1, S)
    pairs = T * (C - new) + T * (new + 1) / 2
    moved = (S * C * D + T * H * (D + E)) * itemsize + 4 * T * H + 4 * S * dims["W"]
    return Cost(flops=round(2 * pairs * H * (D + E)), bytes=moved)


MIXED, DECODE = paged.MIXED, paged.DECODE
SMALL: dict[str, Any] = {"H": 4, "rank": 16, "rope": 8}
# With a scale of 1 / 128 the order of a sum of 512 products costs the weights less than `ulps` in fp32.
LARGE: dict[str, Any] = {"H": 40, "rank": 512, "rope": 64, "B": 16, "scale": 1 / 128}
CASES = [
    Case("decode", "one new token each, contexts of several lengths", plan=DECODE, **SMALL),
    Case("mixed", "decodes, a prefill and a chunk in one plan", plan=MIXED, **SMALL),
    Case("prefill", "nothing is past: plain causal attention", plan=((0, 9), (0, 3)), **SMALL),
    Case("dirty", "what lies past a sequence's end is NaN and must not be touched", plan=MIXED, dirty=True, **SMALL),
    Case("dirty_decode", "the same where only decodes run", plan=DECODE, dirty=True, **SMALL),
    Case("padded", "sequences without a token, and without a context", plan=((4, 2), (0, 0), (6, 0)), **SMALL),
    Case("padded_decode", "the same beside decodes", plan=((4, 1), (0, 0), (6, 1)), **SMALL),
    Case("none", "sequences without new tokens", plan=((4, 0), (9, 0)), **SMALL),
    Case("slack", "max_len and max_context are bounds that no sequence reaches", plan=((4, 1), (2, 1)), slack=2,
         **SMALL),
    Case("shared", "two sequences share their first block", plan=((7, 1), (6, 2)), shared=True, **SMALL),
    Case("block_of_one", "a block has one position", plan=MIXED, B=1, **SMALL),
    Case("window", "a query attends to itself and two positions before it", plan=MIXED, window=3, **SMALL),
    Case("wide_window", "a window longer than every context masks nothing", plan=MIXED, window=2**31 - 1, **SMALL),
    Case("window_dirty", "blocks before the window are released, and hold NaN", plan=((14, 1), (9, 3)), window=3,
         dirty=True, **SMALL),
    Case("split", "the keys are split into ranges, and one sequence has no keys in most of them",
         plan=((300, 1), (9, 1), (700, 1)), B=16, dirty=True, sms=8, **SMALL),
    Case("split_window", "the keys are split, and some ranges are before the window", plan=((600, 1), (700, 2)), B=16,
         window=200, dirty=True, sms=8, **SMALL),
    Case("many_heads", "more heads than a tile has rows, and the last tile is not full", plan=((7, 1), (30, 2)), H=72,
         rank=16, rope=8),
    Case("heads", "the number of heads is not a power of two", plan=MIXED, H=3, rank=16, rope=8),
    Case("odd", "no size is a multiple of a block", plan=((6, 7), (12, 1), (30, 1)), H=3, rank=11, rope=5, B=5),
    Case("unrotated", "a row is a latent and nothing else", plan=MIXED, H=4, rank=16, rope=0),
    Case("scale", "the scale is given and is not 1 / sqrt(D)", plan=MIXED, scale=0.3, **SMALL),
    Case("loud", "exp of these scores overflows unless the maximum is subtracted", plan=MIXED, loud=256.0, **SMALL),
    Case("v3", "DeepSeek-V3's sizes, for which there is a kernel of its own on Hopper", plan=((70, 1), (0, 1)),
         dirty=True, **LARGE),
    Case("v3_split", "the same with the keys in ranges, a chunk, and a sequence without a token",
         plan=((500, 1), (9, 0), (9, 2)), dirty=True, sms=132, **LARGE),
    Case("long", "contexts are many blocks long", plan=((300, 1), (130, 40)), H=2, rank=16, rope=8, B=16),
]  # fmt: skip
V3: dict[str, Any] = {"H": 128, "rank": 512, "rope": 64, "B": 16, "bench": True}  # DeepSeek-V3 on one device
BENCH = [
    Case("decode_v3", "64 requests of 4k tokens to DeepSeek-V3: products are the time", S=64, past=4095, **V3),
    Case(
        "decode_lite",
        "the same to DeepSeek-V2-Lite, 16 heads: bytes of the cache are the time",
        S=64,
        past=4095,
        **V3 | {"H": 16},
    ),
    Case("decode_32k", "4 long contexts: few sequences must still fill the GPU", S=4, past=32767, **V3),
    Case("chunk_lite", "a chunk of 512 tokens after 8k, 16 heads", S=1, past=8192, new=512, **V3 | {"H": 16}),
    Case("chunk_v3", "a chunk of 512 tokens after 8k", S=1, past=8192, new=512, **V3),
]

SPEC = OpSpec(
    name="mla_attention",
    signature="q[T, H, D], cache[N, B, D], block_tables[S, W]: i32, cu_seqlens[S1]: i32, context_lens[S]: i32,"
    " rank: int, max_len: int, max_context: int, window: int?, scale: float? -> out[T, H, rank], lse[T, H]: acc",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    refuse=refuse,
    check_values=check_values,
    ulps=paged.SPEC.ulps,
    torch_cpu_ulps_of=paged.SPEC.torch_cpu_ulps_of,
    nonempty=("N", "B", "W", "H", "D"),
    independent=("H",),
    unsupported=unsupported,
    spills={"mla_kernel": 40},  # a chunk in tiles of 64 keys: 279 TFLOP/s, and 202 in tiles of 32, which do not spill
    cases=[*CASES, *BENCH],
)
