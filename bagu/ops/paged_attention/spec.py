"""Attention over a paged cache: each new token attends to the keys and values of its sequence, stored in any blocks.

    position j of sequence s    k = k_cache[block_tables[s, j // B], j % B], v from v_cache in the same way
    s[i, j] = scale * q[i] . k[j] - slope * (i - j) + bias[R - 1 + clamp(j - i, ±(R - 1))]
    lse[i]  = log(exp(sink) + sum_j exp(s[i, j]))        out[i] = sum_j exp(s[i, j] - lse[i]) * v[j]

for each head, over the positions j <= i (with i - j < window if there is one) of the query's own sequence. The new
tokens of sequence s are q[cu_seqlens[s] : cu_seqlens[s + 1]], and they are the last of its context_lens[s] positions:
one new token is a decode, all tokens are a prefill, and anything between is a chunk of a prefill. Table entries past a
sequence's end or before its window are not read, and the memory there may hold anything. Heads, slopes, bias and lse
are as in `attention`, which gives the same numbers for a sequence in contiguous memory. In an 8-bit cache k is
k_cache * k_scale and v is v_cache * v_scale (kv_write/quantize.py). There are no gradients.

Dims: T = new tokens, H = query heads, G = key heads, D = key dim, E = value dim, N = blocks, B = positions per
block, S = sequences, S1 = S + 1, W = the table's width, P = 2R - 1.
Paper: https://arxiv.org/abs/2309.06180 (PagedAttention)
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.ops.attention import flash
from bagu.ops.attention.block_sizes import WIDEST
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.contract.values import check_range
from bagu.ops.kv_write.quantize import check_cache
from bagu.ops.kv_write.spec import filled
from bagu.ops.paged_attention import cpu


class Args(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens: torch.Tensor
    context_lens: torch.Tensor
    slopes: torch.Tensor | None
    bias: torch.Tensor | None
    sinks: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    max_len: int
    max_context: int
    window: int | None
    scale: float | None


def reference(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, one sequence at a time."""
    k_cache, v_cache, window, scale = a.k_cache, a.v_cache, a.window, a.scale
    if a.k_scale is not None and a.v_scale is not None:
        k_cache, v_cache = k_cache * a.k_scale.unsqueeze(-1), v_cache * a.v_scale.unsqueeze(-1)
    B, per_group = k_cache.shape[1], a.q.shape[1] // k_cache.shape[2]
    scale = a.q.shape[-1] ** -0.5 if scale is None else scale
    offsets, outs, lses = a.cu_seqlens.tolist(), [], []
    for s, length in enumerate(a.context_lens.tolist()):
        begin, end = offsets[s], offsets[s + 1]
        places = [(int(a.block_tables[s, j // B]), j % B) for j in range(length)] if end > begin else []
        first = 0 if window is None else max(0, length - (end - begin) - window + 1)
        k, v = (
            torch.stack([x[at] for at in places[first:]] or [x[0, 0]]).repeat_interleave(per_group, 1)
            for x in (k_cache, v_cache)
        )
        i = torch.arange(length - (end - begin), length)[:, None]
        j = torch.arange(first, first + k.shape[0])[None, :]
        scores = scale * torch.einsum("ihd,jhd->hij", a.q[begin:end], k)
        if a.slopes is not None:
            scores = scores - a.slopes[:, None, None] * (i - j).abs()
        if a.bias is not None:
            R = (a.bias.shape[1] + 1) // 2
            scores = scores + a.bias[:, R - 1 + (j - i).clamp(1 - R, R - 1)]
        seen = (j <= i) if window is None else (j <= i) & (i - j < window)
        scores = scores.masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1)
        if a.sinks is not None:
            lse = torch.logaddexp(lse, a.sinks[:, None])
        outs.append(torch.einsum("hij,jhe->ihe", (scores - lse[..., None]).exp(), v))
        lses.append(lse.T)
    return torch.cat(outs), torch.cat(lses)


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    """`plan` has (past, new) of each sequence; without it there are S sequences of `past` and `new`."""
    plan = case.get("plan", ((case.get("past", 0), case.get("new", 1)),) * case.get("S", 1))
    H, D, B = case["H"], case["D"], case.get("B", 4)
    G, E = case.get("G", H), case.get("E", D)
    contexts = [past + new for past, new in plan]
    widths = [-(-c // B) for c in contexts]
    count = sum(widths) + case.get("spare", 2)
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    if case.get("row", False):
        shuffled = torch.arange(count, dtype=torch.int32)
    tables = torch.full((len(plan), max(1, *widths)), -1, dtype=torch.int32)  # -1: an entry that must not be read
    at = 0
    for s, n in enumerate(widths):
        tables[s, :n] = shuffled[at : at + n]
        at += n
    q = streams.normal("q", sum(new for _, new in plan), H, D)
    k, v = streams.normal("k", count, B, G, D), streams.normal("v", count, B, G, E)
    k_scale = v_scale = None
    if "dtype" in case.params:
        (k, k_scale), (v, v_scale) = (filled(streams, name, x.shape, case["dtype"]) for name, x in (("k", k), ("v", v)))
    if "loud" in case.params:  # adds one constant to all scores, which leaves the weights unchanged
        q[..., 0], k[..., 0] = case["loud"], 2.0
    if case.get("dirty", False):
        used = torch.zeros(count, B, dtype=torch.bool)
        for table, c in zip(tables.tolist(), contexts, strict=True):
            for j in range(c):
                used[table[j // B], j % B] = True
        for x in (k, v) if k_scale is None or v_scale is None else (k_scale, v_scale):
            x[~used] = torch.nan
    if case.get("shared", False):
        tables[1:, 0] = tables[0, 0]
    heads = torch.arange(1, H + 1, dtype=torch.float64)
    return {
        "q": q,
        "k_cache": k,
        "v_cache": k[..., :E] if case.get("latent", False) else v,
        "block_tables": tables,
        "cu_seqlens": torch.tensor((0, *(new for _, new in plan))).cumsum(0).to(torch.int32),
        "context_lens": torch.tensor(contexts, dtype=torch.int32),
        "slopes": 2 ** (-8 * heads / H) if case.get("alibi", False) else None,
        "bias": streams.normal("bias", H, 2 * case["R"] - 1) if "R" in case.params else None,
        "sinks": streams.normal("sinks", H) if case.get("sinks", False) else None,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "max_len": max(new for _, new in plan) + case.get("slack", 0),
        "max_context": max(contexts) + case.get("slack", 0),
        "window": case.get("window", None),
        "scale": case.get("scale", streams.choice("scale", None, 0.2)),
    }


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    H, G = dims["H"], dims["G"]
    if G == 0 or H % G:
        raise ArgumentError(
            f"paged_attention: q has {H} heads and k_cache has {G}, expected a multiple",
            hint="each key head serves H / G query heads",
        )
    for name in ("k", "v"):
        check_cache("paged_attention", f"{name}_cache", args[f"{name}_cache"], args[f"{name}_scale"], args["q"].dtype)
    refuse_plan("paged_attention", args, dims)
    if args["bias"] is not None and dims["P"] % 2 == 0:
        raise ArgumentError(
            f"paged_attention: bias has {dims['P']} distances, expected an odd number",
            hint="2R - 1 columns stand for the distances -(R - 1) … R - 1",
        )


def refuse_plan(op: str, args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for offsets, bounds or a window that cannot be right, for any op over block tables."""
    T, S, longest = dims["T"], dims["S"], args["max_context"]
    if dims["S1"] != S + 1 or S * args["max_len"] < T:
        raise ArgumentError(
            f"{op}: cu_seqlens has {dims['S1']} offsets for {S} sequences of at most max_len ="
            f" {args['max_len']}, and there are {T} tokens",
            hint="cu_seqlens has S + 1 offsets and ends with T; max_len is the most new tokens of a sequence",
        )
    if not 1 <= longest <= dims["W"] * dims["B"]:
        raise ArgumentError(
            f"{op}: max_context is {longest}, and a table of {dims['W']} blocks holds 1 to"
            f" {dims['W'] * dims['B']} places",
            hint="max_context is the length of the longest sequence, new tokens included",
        )
    if args["window"] is not None and args["window"] < 1:
        raise ArgumentError(
            f"{op}: window is {args['window']}, and a query sees at least itself",
            hint="window = 1 is the query's own key; None is no window",
        )


def unsupported(args: Mapping[str, Any]) -> str | None:
    """The reason the Triton kernels cannot run a call; None if they can."""
    widest = max(args["q"].shape[-1], args["v_cache"].shape[-1])
    if args["bias"] is not None:
        return "its kernels have no learned bias by distance"
    if widest > WIDEST:
        return f"its tiles have room for heads of {WIDEST} features, and here is one of {widest}"
    old = args["q"].is_cuda and torch.cuda.get_device_capability(args["q"].device) < (8, 9)
    if old and args["k_cache"].dtype == torch.float8_e4m3fn:
        return "fp8 needs a GPU of compute capability 8.9 or more"
    return None


def check_values(args: Mapping[str, Any], dims: Dims) -> None:
    check_plan("paged_attention", args, dims)


def check_plan(op: str, args: Mapping[str, Any], dims: Dims) -> None:
    """Check the offsets, and that the block table entries which queries attend to are blocks of the pool."""
    N, B, window = dims["N"], dims["B"], args["window"]
    offsets, contexts = args["cu_seqlens"].tolist(), args["context_lens"].tolist()
    cpu.check(op, offsets, contexts, dims["T"], args["max_len"], args["max_context"])
    for s, ((begin, end), context) in enumerate(zip(pairwise(offsets), contexts, strict=True)):
        first = 0 if window is None else max(0, context - (end - begin) - window + 1)
        seen = args["block_tables"][s, first // B : -(-context // B)] if end > begin else args["block_tables"][s, :0]
        check_range(op, f"block_tables[{s}]", seen, N, "the pool")


def derive(args: Mapping[str, Any], dims: Dims) -> Dims:
    return {"cache_itemsize": args["k_cache"].dtype.itemsize, "scales": int(args["k_scale"] is not None)}


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Assumes that every sequence has max_context: two products per pair and head; keys and values are read once."""
    T, H, G, D, E, S, C = (dims[n] for n in ("T", "H", "G", "D", "E", "S", "max_context"))
    new = T / max(1, S)
    pairs = T * (C - new) + T * (new + 1) / 2
    moved = (S * C * G * dims["cache_itemsize"] + T * H * itemsize) * (D + E) + 4 * T * H + 4 * S * dims["W"]
    moved += 8 * S * C * G * dims["scales"]
    return Cost(flops=round(2 * pairs * H * (D + E)), bytes=moved)


MIXED = ((7, 1), (0, 5), (3, 4), (0, 1), (12, 1))
DECODE = ((7, 1), (0, 1), (3, 1), (15, 1))
CASES = [
    Case("decode", "one new token each, contexts of several lengths", plan=DECODE, H=2, D=8),
    Case("mixed", "decodes, a prefill and a chunk in one plan", plan=MIXED, H=2, D=8),
    Case("prefill", "nothing is past: plain causal attention", plan=((0, 9), (0, 3)), H=2, D=8),
    Case("chunk", "a chunk sees its past in full and itself causally", plan=((5, 6),), H=3, D=16),
    Case("dirty", "what lies past a sequence's end is NaN and must not be touched", plan=MIXED, H=2, D=8, dirty=True),
    Case("dirty_decode", "the same where only decodes run", plan=DECODE, H=2, D=8, dirty=True),
    Case("dirty_gqa", "the same where keys are gathered", plan=DECODE, H=8, G=1, D=8, dirty=True),
    Case("padded", "sequences without a token, and without a context", plan=((4, 2), (0, 0), (6, 0)), H=2, D=8),
    Case("padded_decode", "the same beside decodes", plan=((4, 1), (0, 0), (6, 1)), H=2, D=8),
    Case("slack", "max_len and max_context bound what is there and are not reached", plan=((4, 1), (2, 1)), H=2, D=8,
         slack=2),
    Case("shared", "two sequences share their first block", plan=((7, 1), (6, 2)), H=2, D=8, shared=True),
    Case("whole_blocks", "contexts end where a block does", plan=((7, 1), (0, 8), (3, 1)), H=2, D=8),
    Case("few", "fewer decodes than are worth doing at once", plan=((7, 1), (0, 1), (9, 1)), H=2, D=8),
    Case("in_a_row", "blocks are neighbours in the pool, so that a sequence is a view", plan=((7, 1), (6, 5)), H=2, D=8,
         row=True, dirty=True),
    Case("in_a_row_window", "the same, the view beginning inside a block", plan=((11, 1), (10, 3)), H=2, D=8, row=True,
         window=5, dirty=True),
    Case("one_block", "the blocks are larger than every context", plan=DECODE, H=2, D=8, B=16),
    Case("large_blocks", "blocks are read where they lie, a part each", plan=((300, 1), (127, 1), (128, 1), (3, 1)),
         H=4, G=2, D=16, B=128, dirty=True),
    Case("large_blocks_window", "the same, the window beginning inside a block and before the first",
         plan=((300, 1), (200, 1), (128, 1), (3, 1)), H=2, D=16, B=128, window=150, dirty=True),
    Case("large_blocks_chunk", "the same beside a chunk", plan=((300, 1), (120, 20)), H=2, D=16, B=128, dirty=True),
    Case("block_of_one", "a block is a single place", plan=MIXED, H=2, D=8, B=1),
    Case("gqa", "two query heads share a key head", plan=MIXED, H=4, G=2, D=8),
    Case("mqa", "all query heads share one key head, and they are more than a tile has rows", plan=DECODE, H=40, G=1,
         D=8),
    Case("wide", "heads of 160 features", plan=((7, 1), (3, 4)), H=2, D=160, E=144),
    Case("none", "sequences without new tokens", plan=((4, 0), (9, 0)), H=2, D=8),
    Case("latent", "MLA: the values are the first features of the keys", plan=MIXED, H=8, G=1, D=24, E=16, latent=True),
    Case("narrow_values", "a value is shorter than a key", plan=MIXED, H=2, D=24, E=16),
    Case("wide_values", "a value is longer than a key", plan=MIXED, H=2, D=8, E=20),
    Case("window", "a query sees itself and two before it", plan=MIXED, H=2, D=8, window=3),
    Case("window_dirty", "blocks before the window are given back, and their places hold NaN", plan=((14, 1), (9, 3)),
         H=2, D=8, window=3, dirty=True),
    Case("window_wide", "the window is past every context, so it hides nothing", plan=MIXED, H=2, D=8, window=99),
    Case("window_decode", "only decodes, some contexts shorter than the window", plan=DECODE, H=2, D=8, window=6),
    Case("pieces", "more queries behind a past than one piece has", plan=((90, 530), (3, 1)), H=1, D=8),
    Case("window_pieces", "the same through a window, with a past and without", plan=((90, 530), (0, 300)), H=1, D=8,
         window=70),
    Case("alibi", "each head has a slope of its own", plan=MIXED, H=4, G=2, D=8, alibi=True),
    Case("alibi_far", "slope times distance has more digits than bf16", plan=((300, 1), (290, 3)), H=2, D=8, alibi=True,
         mixed=["slopes"]),
    Case("bias", "a learned bias by distance, clamped at its end", plan=MIXED, H=2, D=8, R=4),
    Case("bias_alibi", "slopes, bias and window at once", plan=MIXED, H=2, D=8, R=3, alibi=True, window=4),
    Case("sinks", "a logit per head without a value", plan=MIXED, H=4, G=2, D=8, sinks=True),
    Case("sinks_split", "the same, added once although the keys are split", plan=((300, 1), (9, 1), (700, 1)), H=2,
         D=8, B=16, sinks=True, sms=8),
    Case("split_window", "the keys are split, and some ranges lie before the window", plan=((600, 1), (700, 2)), H=2,
         D=8, B=16, window=200, dirty=True, sms=8),
    Case("verify", "a few tokens of each sequence, as a check of drafted ones has", plan=((70, 5), (300, 4), (0, 5)),
         H=6, G=2, D=16, B=16),
    Case("scale", "the scale is given and is not 1 / sqrt(D)", plan=MIXED, H=2, D=8, scale=0.3),
    Case("loud", "exp of these scores overflows unless the maximum is taken off", plan=MIXED, H=2, D=16, loud=256.0),
    Case("int8", "8-bit keys and values, with a scale per position and head", plan=MIXED, H=4, G=2, D=16, dtype="int8",
         dirty=True),
    Case("int8_decode", "the same where only decodes run", plan=DECODE, H=2, D=8, dtype="int8", dirty=True),
    Case("int8_split", "the same with the keys split, a window, and values wider than keys",
         plan=((600, 1), (700, 2)), H=2, D=8, E=20, B=16, window=200, dtype="int8", sms=8),
    Case("int8_words", "values are read as words of four features", plan=MIXED, H=4, G=2, D=64, dtype="int8"),
    Case("int8_unpadded", "the last words of a row are not full tiles", plan=DECODE, H=2, D=36, E=52, dtype="int8"),
    Case("fp8_words", "the same with 8-bit floats", plan=MIXED, H=4, G=2, D=16, E=64, dtype="fp8"),
    Case("fp8", "8-bit floats, with scales of the same kind", plan=MIXED, H=4, G=2, D=16, dtype="fp8", dirty=True),
    Case("odd", "no size is a multiple of a block", plan=((6, 7), (12, 1), (30, 1)), H=3, D=11, E=5, B=5),
    Case("long", "contexts are many blocks long", plan=((600, 1), (130, 70), (0, 257), (511, 1)), H=2, D=16, B=16),
]  # fmt: skip
BIG: dict[str, Any] = {"H": 32, "G": 8, "D": 128, "B": 16, "bench": True}
BENCH = [
    Case(
        "decode_8b", "64 requests of 2k tokens to an 8B model: bytes of the cache are the time", S=64, past=2047, **BIG
    ),
    Case("decode_32k", "4 long contexts: few sequences must still fill the GPU", S=4, past=32767, **BIG),
    Case("decode_small", "256 requests of 1k tokens to a 0.6B model", S=256, past=1049, **BIG | {"H": 16}),
    Case(
        "decode_int8",
        "64 requests of 8k tokens to a 0.6B model, 8-bit cache",
        S=64,
        past=8191,
        dtype="int8",
        **BIG | {"H": 16},
    ),
    Case("prefill_8b", "a prompt of 8k tokens to an 8B model", S=1, new=8192, **BIG),
    Case("chunk_8b", "a chunk of 512 tokens after 8k", S=1, past=8192, new=512, **BIG),
    Case("chunk_int8", "the same with an 8-bit cache", S=1, past=8192, new=512, dtype="int8", **BIG),
    Case("laptop", "bagu's demo model, 32 streams", S=32, past=127, H=4, D=64, B=16, bench=True),
]

SPEC = OpSpec(
    name="paged_attention",
    signature="q[T, H, D], k_cache[N, B, G, D]: any, v_cache[N, B, G, E]: any, block_tables[S, W]: i32,"
    " cu_seqlens[S1]: i32, context_lens[S]: i32, slopes[H]?: float, bias[H, P]?: float, sinks[H]?: float,"
    " k_scale[N, B, G]?: acc, v_scale[N, B, G]?: acc, max_len: int, max_context: int, window: int?, scale: float?"
    " -> out[T, H, E], lse[T, H]: acc",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    derive=derive,
    refuse=refuse,
    check_values=check_values,
    ulps=4,  # as in attention: fused kernels round the weights to 16 bits before the product with the values
    torch_cpu_ulps_of={"lse": flash.LSE_ULPS},
    nonempty=("N", "B", "W", "H", "G", "D"),
    independent=("H", "G"),
    unsupported=unsupported,
    cases=[*CASES, *BENCH],
)
