"""The blocks of keys that a query of block-sparse attention attends to: few, and chosen by the query itself.

    score[i, g, j] = (sum of q[i, h] over the heads h of group g) . means[block_tables[s, j], g]

A query at position p of its sequence s is in block b = p // size. If p < dense_below it attends to all blocks 0 … b.
Otherwise to its own block, the `near` blocks before it, block 0, and, of the blocks between 0 and these, to the `top`
with the largest scores; of equal scores the earlier block is chosen. blocks[i, g] has their numbers j in ascending
order, the own block last, then -1. The own block is never scored: its mean would contain later keys. A query's choice
depends on itself and on full blocks before it alone, so it is the same in training, prefill and decode. lengths[i, g]
is the number of keys in them, up to the query's own. With `pages` the numbers are block_tables[s, j] instead of j.

The new tokens of sequence s are q[cu_seqlens[s] : cu_seqlens[s + 1]], the last of its context_lens[s] positions, as in
`paged_attention`. means[n] is the mean key of block n. There are no gradients.

Dims: T = new tokens, H = query heads, G = key heads, D = key dim, N = blocks of the pool, S = sequences, S1 = S + 1,
W = the table's width, K = most blocks of a query.
Papers: https://arxiv.org/abs/2502.13189 (MoBA), https://arxiv.org/abs/2509.24663 (InfLLM-V2)
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.contract.values import check_range


class Args(NamedTuple):
    q: torch.Tensor
    means: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens: torch.Tensor
    context_lens: torch.Tensor
    max_len: int
    max_context: int
    size: int
    top: int
    near: int
    dense_below: int
    pages: bool


def num_chosen(size: int, top: int, near: int, dense_below: int, max_context: int) -> int:
    """The most blocks of a query: of one that chooses, or of the last that attends to all."""
    return min(max(2 + near + top, -(-dense_below // size)), -(-max_context // size))


def reference(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, one query and group after another."""
    T, H, D = a.q.shape
    G = a.means.shape[1]
    q = a.q.reshape(T, G, H // G, D).sum(2)
    K = num_chosen(a.size, a.top, a.near, a.dense_below, a.max_context)
    blocks = torch.full((T, G, K), -1.0, dtype=torch.float64)
    lengths = torch.zeros(T, G, dtype=torch.float64)
    for s, (begin, end) in enumerate(pairwise(a.cu_seqlens.tolist())):
        for i in range(begin, end):
            place = int(a.context_lens[s]) - end + i
            own = place // a.size
            for g in range(G):
                chosen = set(range(own + 1))
                if place >= a.dense_below:
                    between = range(1, max(own - a.near, 1))
                    score = {j: float(q[i, g] @ a.means[int(a.block_tables[s, j]), g]) for j in between}
                    best = sorted(between, key=lambda j: (-score[j], j))[: a.top]
                    chosen = {0, *best, *range(max(own - a.near, 0), own + 1)}
                listed = torch.tensor(sorted(chosen))
                blocks[i, g, : len(chosen)] = (a.block_tables[s, listed] if a.pages else listed).double()
                lengths[i, g] = (len(chosen) - 1) * a.size + place % a.size + 1
    return blocks, lengths


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    """`plan` has (past, new) of each sequence; without it there are S sequences of `past` and `new`."""
    plan = case.get("plan", ((case.get("past", 0), case.get("new", 1)),) * case.get("S", 1))
    size, (H, D) = case.get("size", 4), (case["H"], case["D"])
    contexts = [past + new for past, new in plan]
    widths = [-(-c // size) for c in contexts]
    count = sum(widths) + 2
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    tables = torch.full((len(plan), max(1, *widths)), -1, dtype=torch.int32)  # -1: an entry that must not be read
    at = 0
    for s, n in enumerate(widths):
        tables[s, :n] = shuffled[at : at + n]
        at += n
    means = streams.normal("means", count, case.get("G", H), D)
    if case.get("equal", False):
        means[:] = means[0]
    return {
        "q": streams.normal("q", sum(new for _, new in plan), H, D),
        "means": means,
        "block_tables": tables.to(means.device),
        "cu_seqlens": torch.tensor((0, *(new for _, new in plan))).cumsum(0).to(torch.int32).to(means.device),
        "context_lens": torch.tensor(contexts, dtype=torch.int32).to(means.device),
        "max_len": max(new for _, new in plan),
        "max_context": max(1, *contexts) + case.get("slack", 0),
        "size": size,
        "top": case.get("top", 2),
        "near": case.get("near", 1),
        "dense_below": case.get("dense_below", 0),
        "pages": case.get("pages", False),
    }


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    if dims["G"] == 0 or dims["H"] % dims["G"]:
        raise ArgumentError(
            f"choose_blocks: q has {dims['H']} heads and means has {dims['G']}, expected a multiple",
            hint="each key head serves H / G query heads",
        )
    for name, least in (("size", 1), ("top", 0), ("near", 0), ("dense_below", 0), ("max_context", 1)):
        if args[name] < least:
            raise ArgumentError(f"choose_blocks: {name} = {args[name]}", hint=f"{name} is {least} or more")
    if dims["S1"] != dims["S"] + 1 or -(-args["max_context"] // args["size"]) > max(dims["W"], 1):
        raise ArgumentError(
            f"choose_blocks: {dims['S1']} offsets for {dims['S']} sequences, and tables of {dims['W']} blocks of "
            f"{args['size']} positions for max_context = {args['max_context']}",
            hint="cu_seqlens has S + 1 offsets, and a table an entry for each block of the longest sequence",
        )


def check_values(args: Mapping[str, Any], dims: Dims) -> None:
    for s, context in enumerate(args["context_lens"].tolist()):
        seen = args["block_tables"][s, : -(-context // args["size"])]
        check_range("choose_blocks", f"block_tables[{s}]", seen, dims["N"], "the pool")


def derive(args: Mapping[str, Any], dims: Dims) -> Dims:
    names = ("size", "top", "near", "dense_below", "max_context")
    return {"K": num_chosen(*(args[name] for name in names))}


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Every mean of a sequence is read once, and multiplied with every query."""
    T, H, G, D, S, K = (dims[n] for n in ("T", "H", "G", "D", "S", "K"))
    blocks = -(-dims["max_context"] // dims["size"])
    moved = (T * H + S * blocks * G) * D * itemsize + 4 * T * G * (K + 1) + 4 * S * blocks
    return Cost(flops=2 * T * G * D * blocks, bytes=moved)


MIXED = ((30, 1), (0, 9), (13, 6), (0, 1), (47, 2))
CASES = [
    Case("decode", "one new token of each sequence", plan=((30, 1), (44, 1), (3, 1), (61, 1)), H=2, D=8),
    Case("mixed", "decodes, a prefill, a chunk, a text of one token", plan=MIXED, H=4, G=2, D=16),
    Case("all", "more to choose than there are", plan=((30, 1), (0, 25)), H=2, D=8, top=9),
    Case("none", "only the own block, the last and the first", plan=MIXED, H=2, D=8, top=0),
    Case("own", "nothing but the own block and the first", plan=MIXED, H=2, D=8, top=0, near=0),
    Case("ties", "equal scores: the earlier block", plan=((47, 1), (20, 30)), H=2, D=8, equal=True),
    Case("dense", "short texts attend to all blocks", plan=((21, 1), (0, 40)), H=2, D=8, dense_below=24),
    Case("boundary", "the first and the last token of a block", plan=((31, 1), (32, 1), (27, 2), (28, 4)), H=2, D=8),
    Case("empty", "sequences without a token, and without a context", plan=((20, 2), (0, 0), (9, 0)), H=2, D=8),
    Case("no_tokens", "there is no new token, and nothing is launched", plan=((9, 0), (0, 0)), H=2, D=8),
    Case("slack", "max_context is not reached, large blocks", plan=((140, 1), (90, 2)), H=2, D=8, size=16, slack=1),
    Case("ragged", "no size is a power of two", plan=((50, 3), (7, 1), (0, 23)), H=6, G=3, D=11, size=3, top=3, near=2),
    Case("pages", "numbers of the pool, as the engine asks for", plan=MIXED, H=4, G=2, D=8, pages=True),
    Case("wide", "many more blocks than are chosen", plan=((500, 2), (300, 70)), H=2, D=8, top=7, near=2),
]
BENCH = [
    Case("decode_128k", "one text of 128k tokens to Qwen3-0.6B", S=1, past=131071, H=16, G=8, D=128, size=64, top=16,
         near=8, dense_below=2048, bench=True),
    Case("decode_32k", "32 texts of 32k tokens", S=32, past=32767, H=16, G=8, D=128, size=64, top=16, near=8,
         dense_below=2048, bench=True),
    Case("train_16k", "a training sequence of 16k tokens", S=1, new=16384, H=16, G=8, D=128, size=64, top=16, near=8,
         dense_below=2048, bench=True),
]  # fmt: skip

SPEC = OpSpec(
    name="choose_blocks",
    signature="q[T, H, D], means[N, G, D]: float, block_tables[S, W]: i32, cu_seqlens[S1]: i32, context_lens[S]: i32,"
    " max_len: int, max_context: int, size: int, top: int, near: int, dense_below: int, pages: bool"
    " -> blocks[T, G, K]: i32, lengths[T, G]: i32",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    derive=derive,
    refuse=refuse,
    check_values=check_values,
    ulps=0,
    nonempty=("N", "H", "G", "D"),
    independent=("G",),
    wide_loads=False,  # rows of means are gathered
    cases=[*CASES, *BENCH],
)
