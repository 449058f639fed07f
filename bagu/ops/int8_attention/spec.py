"""Attention whose scores are products of int8 numbers, in the manner of SageAttention. For inference: no gradients.

    k'[j]   = k[j] - mean of k over the segment           softmax is unchanged: all scores of a query shift equally
    q8, k8  = q and k' as int8: round(x / step), where step = max |x| / 127 of one query or of GROUP keys of one head
    s[i, j] = scale * step_q[i] * step_k[j] * (q8[i] . k8[j])        out[i] = sum_j softmax_j(s[i, j]) * v[j]

over the keys j of query i's own segment, with j <= i if `causal`. Groups of keys are counted from the segment's begin.
The product is an exact int32. The weights are not rounded to 8 bits: they are multiplied by v in v's dtype. Head h
reads keys and values of group h // (H / G). `scale` defaults to 1 / sqrt(D).

Keys have a few features that are large for every token; taking the mean off leaves int8 to what differs. The rounding
error of a score is about scale * sqrt(D / 12) * sqrt(step_q^2 rms(k')^2 + step_k^2 rms(q)^2); docs/ops.md has the error
of `out` by shape. A NaN or an infinity in a key spoils its head for the whole segment, by the mean.

Dims: T = tokens, H = query heads, G = key heads, D = features of a head, S1 = segments + 1.
Papers: https://arxiv.org/abs/2410.02367 (SageAttention), 2411.10958 (SageAttention2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.ops.attention.spec import pairs
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.contract.values import check_offsets, check_segments

HEADS = (64, 128)  # sizes of a head that the Triton kernels have

NO_TERMS: dict[str, Any] = dict.fromkeys(("window", "slopes", "bias", "sinks", "softcap"))  # of `attention`
GROUP = 128  # keys of a segment that share a scale


def rounded(x: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """x as the nearest multiples of top / 127, where top is the largest |x| of its group. All 0 if that is no normal
    fp32 number; NaN if it is infinite or NaN."""
    scale = top / 127
    scale = torch.where(scale < 2.0**-126, 0.0, scale)
    return torch.where((scale > 0) & scale.isfinite(), x / scale, 0.0).round() * scale


class Args(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    max_len: int
    causal: bool
    scale: float | None


def reference(a: Args) -> torch.Tensor:
    """The definition, computed segment by segment."""
    q, scale = a.q, a.scale
    per_group, scale = q.shape[1] // a.k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    q, out = rounded(q, q.abs().amax(-1, keepdim=True)), torch.empty_like(q)
    for begin, end in pairwise(a.cu_seqlens.tolist()):
        if begin < end:
            centred = a.k[begin:end] - a.k[begin:end].mean(0)
            groups = [rounded(x, x.abs().amax((0, 2), keepdim=True)) for x in centred.split(GROUP)]
            keys, values = (x.repeat_interleave(per_group, 1) for x in (torch.cat(groups), a.v[begin:end]))
            s = scale * torch.einsum("ihd,jhd->hij", q[begin:end], keys)
            later = torch.ones(s.shape[1:], dtype=torch.bool).triu(1)
            s = s.masked_fill(later, -torch.inf) if a.causal else s
            out[begin:end] = torch.einsum("hij,jhd->ihd", s.softmax(-1), values)
    return out


def unsupported(args: Mapping[str, Any]) -> str | None:
    """The reason the Triton kernels cannot run a call; None if they can."""
    D = args["q"].shape[-1]
    return None if D in HEADS else f"its kernels have heads of 64 or 128 features, not {D}"


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for invalid calls that the signature cannot express."""
    check_segments("int8_attention", dims, args["max_len"])
    if args["scale"] is not None and not args["scale"] > 0:  # the largest product gives the largest score
        raise ArgumentError(
            f"int8_attention: scale is {args['scale']}, expected a number above 0", hint="None is 1 / sqrt(D)"
        )


def check_values(args: Mapping[str, Any], dims: Dims) -> None:
    check_offsets("int8_attention", args["cu_seqlens"].tolist(), dims["T"], args["max_len"])


def _steps(streams: Streams, name: str, *shape: int) -> torch.Tensor:
    """Numbers of steps between -126.25 and 126.25, none of them within 0.25 of a tie between two integers."""
    return streams.integers(name, -126, 127, *shape) + 0.5 * streams.uniform(f"{name}, part", *shape) - 0.25


def _integers(
    case: Case, streams: Streams, lengths: Sequence[int], T: int, H: int, G: int, D: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys that fp32 and fp64 round to the same integers, whatever the order of their sums.

    Else a number that is almost a tie would be a step off in one of them. Each query and each group of keys has a step
    of its own and one number that is 127 steps. The keys of a group are in pairs around the segment's mean.
    """
    q, k = _steps(streams, "q", T, H, D), _steps(streams, "k", T, G, D)
    q[..., 3] = 127.0
    k[..., 5] = 127.0
    means = streams.normal("means", len(lengths), G, D)
    shift = torch.cat([mean.expand(n, G, D) for mean, n in zip(means, lengths, strict=True)])
    begin = 0
    for number, size in enumerate(min(GROUP, n - at) for n in lengths for at in range(0, n, GROUP)):
        half, end = size // 2, begin + size
        k[begin : begin + half] *= 0.006 * (1 + number % 3)
        k[end - half : end] = -k[begin : begin + half].flip(0)
        k[begin + half : end - half] = 0.0  # the one in the middle
        begin = end
    q = q * 0.02 * (0.5 + streams.uniform("step of q", T, H, 1)) * case.get("loud", 1.0)
    return q, k + case.get("shift", 1.0) * shift


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    lengths = case.get("lengths", (case.get("L", 1),) * case.get("S", 1))
    T, H, D = sum(lengths), case["H"], case["D"]
    G = case.get("G", H)
    v = streams.normal("v", T, G, D)
    offsets = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    if v.is_meta:  # shapes only: torch would import its compiler to compute the others
        q, k = streams.normal("q", T, H, D), streams.normal("k", T, G, D)
    else:
        q, k = _integers(case, streams, lengths, T, H, G, D)
    return {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens": offsets,
        "max_len": case.get("max_len", max(lengths)),
        "causal": case.get("causal", True),
        "scale": case.get("scale", streams.choice("scale", None, 0.2)),
    }


def cost(dims: Mapping[str, Any], itemsize: int) -> Cost:
    """Two products for each pair and head. q, k and v are read once; out is written once."""
    T, H, G, D = (dims[n] for n in "THGD")
    return Cost(flops=4 * pairs({**dims, "window": None}) * H * D, bytes=2 * T * (H + G) * D * itemsize)


RAGGED = (5, 1, 9, 2)
ONE: dict[str, Any] = {"H": 16, "D": 128, "bench": True}
VARLEN = (1365, 819, 1912)

SPEC = OpSpec(
    name="int8_attention",
    signature="q[T, H, D], k[T, G, D], v[T, G, D], cu_seqlens[S1]: i32, max_len: int, causal: bool, scale: float?"
    " -> out[T, H, D]",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    refuse=refuse,
    check_values=check_values,
    unsupported=unsupported,
    ulps=4,  # as attention: the weights are rounded to 16 bits before their product with v
    nonempty=("D",),
    independent=("H", "G"),
    peers=True,
    matmul_rate=4 / 3,  # one of its two products is int8, at twice the rate
    cases=[
        Case("even", "segments of one length, so a failure here is the math", S=2, L=4, H=2, D=64),
        Case("ragged", "lengths differ, one segment is a single token", lengths=RAGGED, H=2, D=64),
        Case("gqa", "two query heads share a key head", lengths=RAGGED, H=4, G=2, D=64),
        Case("full", "a query sees its whole segment", lengths=(7, 1, 6), H=2, D=64, causal=False),
        Case("hollow", "empty segments stand first, in the middle and last", lengths=(0, 4, 0, 3, 0, 0), H=2, D=64),
        Case("slack", "max_len bounds the lengths and none reaches it", lengths=(3, 5), max_len=5000, H=1, D=64),
        Case("scale", "the scale is given and is not 1 / sqrt(D)", lengths=(6, 3), H=2, D=64, scale=0.3),
        Case("centred", "the mean of the keys is zero", lengths=(8, 3), H=1, D=64, shift=0.0),
        Case("loud", "exp of these scores overflows unless the maximum is taken off", lengths=(9, 6), H=1, D=64,
             loud=100.0),
        Case("groups", "segments have several groups of keys with scales of their own", lengths=(300, 140), H=2, G=1,
             D=64),
        Case("groups_full", "the same, and every query sees all groups", lengths=(260, 20), H=1, D=64, causal=False),
        Case("head_128", "the larger head, in several blocks", lengths=(150, 40), H=2, G=1, D=128),
        Case("head_80", "a head that the kernels have no tile for", lengths=RAGGED, H=2, D=80),
        Case("no_tokens", "a batch with no token has an empty result", lengths=(0, 0), H=2, D=64),
        Case("causal_16k", "the bar: one segment of 16k tokens", S=1, L=16384, **ONE),
        Case("full_16k", "the bar, without a mask", S=1, L=16384, causal=False, **ONE),
        Case("causal_4k", "four segments of 4k tokens", S=4, L=4096, **ONE),
        Case("varlen_16k", "packed documents: thirds, fifths and the rest of 16k", lengths=tuple(4 * n for n in VARLEN),
             **ONE),
        Case("gqa_16k", "32 heads over 8 key heads", S=1, L=16384, H=32, G=8, D=128, bench=True),
        Case("head_64_16k", "heads of 64: half the features per exp", S=1, L=16384, H=32, D=64, bench=True),
    ],
)  # fmt: skip
