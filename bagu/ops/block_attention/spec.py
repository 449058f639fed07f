"""Block-sparse attention over packed segments: each query attends to few blocks of keys of its segment.

    s[i, j] = scale * q[i] . k[j]      for positions j <= i of the blocks j // size in blocks[i, g]
    lse[i]  = log(sum_j exp(s[i, j]))        out[i] = sum_j exp(s[i, j] - lse[i]) * v[j]

for each head, where g is its key head. Blocks are counted from the begin of the segment. blocks[i, g] is what
`choose_blocks` gives with the same `size`, `near` and `dense_below`: the block numbers in ascending order, then -1. All
queries of a block share the blocks near them and the first, or all blocks before `dense_below`; only what lies between
differs from query to query. The choice has no gradient.

Dims: T = tokens, H = query heads, G = key heads, D = key dim, E = value dim, K = most blocks of a query, S1 = segments
+ 1.
Papers: https://arxiv.org/abs/2502.13189 (MoBA), https://arxiv.org/abs/2511.11571 (FlashMoBA)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.ops.attention.block_sizes import WIDEST
from bagu.ops.choose_blocks import spec as choice
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims


class Args(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    blocks: torch.Tensor
    cu_seqlens: torch.Tensor
    max_len: int
    size: int
    near: int
    dense_below: int
    scale: float | None


def reference(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, one segment at a time."""
    per_group, outs, lses = a.q.shape[1] // a.k.shape[1], [], []
    scale = a.q.shape[-1] ** -0.5 if a.scale is None else a.scale
    k, v = (x.repeat_interleave(per_group, 1) for x in (a.k, a.v))
    for begin, end in pairwise(a.cu_seqlens.tolist()):
        own, j = slice(begin, end), torch.arange(end - begin, device=a.q.device)
        chosen = (a.blocks[own, :, None, :] == (j // a.size)[None, None, :, None]).any(-1)  # [i, g, j]
        seen = chosen.repeat_interleave(per_group, 1).transpose(0, 1) & (j[None, :] <= j[:, None])
        scores = scale * torch.einsum("ihd,jhd->hij", a.q[own], k[own])
        scores = scores.masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1)
        outs.append(torch.einsum("hij,jhe->ihe", (scores - lse[..., None]).exp(), v[own]))
        lses.append(lse.T)
    return torch.cat(outs), torch.cat(lses)


def _drawn(lengths: Sequence[int], G: int, K: int, size: int, top: int, near: int, dense_below: int) -> torch.Tensor:
    """Blocks that random scores choose: the queries of a block do not agree. In pieces, whose scores fit in memory."""
    random, columns, found = torch.Generator().manual_seed(1), -(-max(1, *lengths) // size), []
    for places in torch.cat([torch.arange(n) for n in lengths]).view(-1, 1, 1).split(4096):
        j, own = torch.arange(columns), places // size
        local = (j >= own - near) | (j == 0) | (places < dense_below)
        score = torch.rand(len(places), G, columns, generator=random).masked_fill(local | (j > own), -1.0)
        best = score.topk(min(top, columns))
        chosen = (local & (j <= own)).expand(score.shape)
        chosen = chosen.scatter(-1, best.indices, chosen.gather(-1, best.indices) | (best.values >= 0))
        listed = torch.where(chosen, j, columns).topk(K, largest=False).values
        found.append(torch.where(listed == columns, -1, listed).to(torch.int32))
    return torch.cat(found)


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lengths, H, D = case["lengths"], case["H"], case["D"]
    G, E, T = case.get("G", H), case.get("E", D), sum(lengths)
    size, near, dense_below = case.get("size", 4), case.get("near", 1), case.get("dense_below", 0)
    q = streams.normal("q", T, H, D)
    K = choice.num_chosen(size, case.get("top", 2), near, dense_below, max(1, *lengths))
    if q.is_meta:
        blocks = q.new_empty(T, G, K, dtype=torch.int32)
    else:
        blocks = _drawn(lengths, G, K, size, case.get("top", 2), near, dense_below).to(q.device)
    return {
        "q": q,
        "k": streams.normal("k", T, G, D),
        "v": streams.normal("v", T, G, E),
        "blocks": blocks,
        "cu_seqlens": torch.tensor((0, *lengths)).cumsum(0).to(torch.int32).to(q.device),
        "max_len": max(lengths),
        "size": size,
        "near": near,
        "dense_below": dense_below,
        "scale": case.get("scale", streams.choice("scale", None, 0.2)),
    }


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    if dims["G"] == 0 or dims["H"] % dims["G"]:
        raise ArgumentError(
            f"block_attention: q has {dims['H']} heads and k has {dims['G']}, expected a multiple",
            hint="each key head serves H / G query heads",
        )
    if dims["S1"] < 1 + (dims["T"] > 0):
        raise ArgumentError(
            f"block_attention: cu_seqlens has {dims['S1']} offsets, and there are {dims['T']} tokens",
            hint="cu_seqlens has the offset of each segment, then T",
        )
    if args["size"] < 1 or args["near"] < 0 or args["dense_below"] % args["size"]:
        raise ArgumentError(
            f"block_attention: size = {args['size']}, near = {args['near']}, dense_below = {args['dense_below']}",
            hint="size is 1 or more, near 0 or more, and dense_below a multiple of size",
        )


def unsupported(args: Mapping[str, Any]) -> str | None:
    """The reason the Triton kernels cannot run a call; None if they can."""
    widest = max(args["q"].shape[-1], args["v"].shape[-1])
    if widest > WIDEST:
        return f"its tiles have room for heads of {WIDEST} features, and here is one of {widest}"
    return (
        None
        if args["size"] <= 128
        else f"its tiles have room for blocks of 128 keys, and here is one of {args['size']}"
    )


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Two products with the keys of each chosen block; q, k, v and out are moved once."""
    T, H, G, D, E, K = (dims[n] for n in ("T", "H", "G", "D", "E", "K"))
    pairs = T * min(K * dims["size"], (dims["max_len"] + 1) / 2)
    moved = T * (H + G) * (D + E) * itemsize + 4 * T * H + 4 * T * G * K
    return Cost(flops=round(2 * pairs * H * (D + E)), bytes=moved)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Five products instead of two, and twice the tensors."""
    forward = cost(dims, itemsize)
    return Cost(flops=forward.flops * 5 // 2, bytes=2 * forward.bytes)


CASES = [
    Case("tiny", "one short segment, most of it dense", lengths=(13,), H=2, D=8),
    Case("ragged", "several segments, no size a multiple of a block", lengths=(30, 7, 1, 22), H=3, D=11, E=5),
    Case("gqa", "two query heads choose together", lengths=(41, 25), H=4, G=2, D=16),
    Case("far", "more far blocks than near ones", lengths=(70,), H=2, D=8, top=6, near=0),
    Case("none", "nothing but the window of blocks and the first", lengths=(45, 20), H=2, D=8, top=0),
    Case("dense", "the first tokens attend to all", lengths=(50, 9), H=2, D=8, dense_below=24),
    Case("empty", "segments without a token between others", lengths=(21, 0, 12, 0), H=2, D=8),
    Case("no_tokens", "there is no token, and nothing is launched", lengths=(0, 0), H=2, D=8),
    Case("one", "segments of one token: its score has no gradient", lengths=(1, 1), H=2, D=8, frozen=["q", "k"]),
    Case("boundary", "segments that end with a block", lengths=(32, 16), H=2, D=8),
    Case("blocks_of_32", "blocks of a kernel's size", lengths=(200, 70), H=2, D=16, size=32, top=2),
    Case("scale", "the scale is given and is not 1 / sqrt(D)", lengths=(33,), H=2, D=8, scale=0.3),
]
BENCH = [
    Case("train_16k", "one sequence of 16k tokens, Qwen3-0.6B", lengths=(16384,), H=16, G=8, D=128, size=64, top=16,
         near=8, dense_below=2048, bench=True),
    Case("train_64k", "one sequence of 64k tokens", lengths=(65536,), H=16, G=8, D=128, size=64, top=16, near=8,
         dense_below=2048, bench=True),
]  # fmt: skip

SPEC = OpSpec(
    name="block_attention",
    signature="q[T, H, D], k[T, G, D], v[T, G, E], blocks[T, G, K]: i32, cu_seqlens[S1]: i32, max_len: int, size: int,"
    " near: int, dense_below: int, scale: float? -> out[T, H, E], lse[T, H]: acc",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("q", "k", "v"),
    saves=("q", "k", "v", "blocks", "cu_seqlens", "out", "lse"),
    constant=("lse",),
    refuse=refuse,
    unsupported=unsupported,
    ulps=4,  # as in attention: fused kernels round the weights to 16 bits before the product with the values
    ulps_of={"dq": 6},
    nonempty=("D", "K"),
    independent=("G",),
    wide_loads=False,  # rows are gathered
    # measured: far_backward of 128 queries takes 1.50 ms with these spills, 1.82 or more with tiles that spill less
    spills={"far_backward": 60, "far_forward": 8, "first_backward": 8},
    cases=[*CASES, *BENCH],
)
