"""Linear attention over packed segments: the weights are products of features, so the sums over keys form a state.

    out[i] = sum_j (q[i] . k[j]) v[j] / (eps + sum_j norm_q[i] . norm_k[j])

for each head, over the keys j of i's segment, with j <= i if `causal`. The sums over j are a state sum_j k[j] v[j]^T
of D * E numbers that i's query reads, so the work is linear in T, not quadratic.

q and k are features of the projections: phi(x) = elu(x) + 1 in the paper, always positive. The divisor uses norm_q and
norm_k, or q and k if they are None. RoPE rotates the features after phi, in the numerator only, because a sum of
rotated features could be 0 (RoFormer, equation 19).

Dims: T = tokens, H = query heads, G = key heads (each is shared by H / G query heads), D = features, E = value dim,
F = features of the normaliser, S1 = segments + 1.
Papers: https://arxiv.org/abs/2006.16236, https://arxiv.org/abs/2104.09864
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.contract.values import check_segments

CHUNK = 64  # tokens: the scores of a chunk cost CHUNK * (D + E) per token, its state 2 * D * E


class Args(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    norm_q: torch.Tensor | None
    norm_k: torch.Tensor | None
    max_len: int
    causal: bool
    eps: float


def reference(a: Args) -> torch.Tensor:
    """The definition with all weights, one segment at a time."""
    k, v, norm_q, norm_k = a.k, a.v, a.norm_q, a.norm_k
    norm_q, norm_k = a.q if norm_q is None else norm_q, k if norm_k is None else norm_k
    per_group = a.q.shape[1] // k.shape[1]
    k, v, norm_k = (x.repeat_interleave(per_group, 1) for x in (k, v, norm_k))
    outs = []
    for begin, end in pairwise(a.cu_seqlens.tolist()):
        own = slice(begin, end)
        weights = torch.einsum("ihd,jhd->hij", a.q[own], k[own])
        norms = torch.einsum("ihf,jhf->hij", norm_q[own], norm_k[own])
        if a.causal:
            weights, norms = weights.tril(), norms.tril()
        outs.append(torch.einsum("hij,jhe->ihe", weights, v[own]) / (a.eps + norms.sum(-1).T.unsqueeze(-1)))
    return torch.cat(outs)


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    """Features are positive, but of any sign (as after RoPE) if the normaliser has its own features."""
    lengths = case.get("lengths", (case.get("L", 1),) * case.get("S", 1))
    T, H, D = sum(lengths), case["H"], case["D"]
    G, E, F = case.get("G", H), case.get("E", D), case.get("F", 0)
    positive = lambda name, *shape: 0.1 + streams.uniform(name, *shape)  # noqa: E731
    draw = streams.normal if F else positive
    return {
        "q": draw("q", T, H, D),
        "k": draw("k", T, G, D),
        "v": streams.normal("v", T, G, E),
        "cu_seqlens": torch.tensor((0, *lengths)).cumsum(0).to(torch.int32),
        "norm_q": positive("norm_q", T, H, F) if F else None,
        "norm_k": positive("norm_k", T, G, F) if F else None,
        "max_len": max(lengths) + streams.choice("slack", 0, 5),
        "causal": case.get("causal", True),
        "eps": case.get("eps", streams.choice("eps", 1e-6, 0.3)),
    }


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    check_segments("linear_attention", dims, args["max_len"])
    if (args["norm_q"] is None) != (args["norm_k"] is None):
        given, absent = ("norm_q", "norm_k") if args["norm_k"] is None else ("norm_k", "norm_q")
        raise ArgumentError(f"linear_attention: {given} is given and {absent} is not", hint="pass both, or neither")


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """A state of D * E: each key adds to it, each query reads it. Tokens are read once, out and den written once."""
    T, H, G, D, E, F = (dims.get(n, 0) for n in "THGDEF")
    flops = 4 * T * H * D * E + 4 * T * H * (F or D)
    return Cost(flops=flops, bytes=T * (H + G) * (D + E + F) * itemsize + 4 * T * H)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Three sums like the forward's; all inputs and outputs are read, and the gradients are written."""
    forward, (T, H, G, D, E, F) = cost(dims, itemsize), (dims.get(n, 0) for n in "THGDEF")
    moved = T * (H + G) * (D + E + F) * itemsize + T * (H + G) * (D + F) * itemsize + T * (H + G) * E * itemsize
    return Cost(flops=3 * forward.flops, bytes=moved + 4 * T * H)


RAGGED = (5, 1, CHUNK, 70, 9, 200, 3)
CASES = [
    Case("even", "two segments inside one chunk, so a failure here is the math", S=2, L=4, H=2, D=6),
    Case("ragged", "segments end inside chunks, at their edges, and span several", lengths=RAGGED, H=2, D=5, E=7),
    Case("chunks", "every segment is whole chunks", S=2, L=2 * CHUNK, H=2, D=4),
    Case("single", "one segment is carried through all chunks", S=1, L=3 * CHUNK + 1, H=1, D=8),
    Case("padded", "cu_seqlens is filled up with T, and those segments are empty", lengths=(70, 3, 0, 0), H=2, D=4),
    Case("singletons", "every segment is one token: out is v, but for eps", S=70, L=1, H=2, D=4),
    Case("shared", "two query heads share a key head, and its gradient is their sum", lengths=RAGGED, H=4, G=2, D=4),
    Case(
        "bidirectional",
        "a query reads its whole segment, on both sides of a chunk",
        lengths=RAGGED,
        H=2,
        D=4,
        causal=False,
    ),
    Case("rotated", "features of any sign, normalised by positive ones of their own", lengths=RAGGED, H=2, D=6, F=4),
    Case(
        "rotated_both", "the same, both ways and with shared heads", lengths=(70, 60), H=4, G=2, D=6, F=6, causal=False
    ),
    Case("damped", "eps is large enough to see", S=1, L=9, H=2, D=4, eps=0.5),
]
BENCH = [
    Case("long_32k", "one document of 32k tokens", S=1, L=32768, H=16, D=64, bench=True),
    Case("packed_8k", "sixteen documents of 512 tokens", S=16, L=512, H=16, D=64, bench=True),
]

SPEC = OpSpec(
    name="linear_attention",
    signature="q[T, H, D], k[T, G, D], v[T, G, E], cu_seqlens[S1]: i32, norm_q[T, H, F]?, norm_k[T, G, F]?,"
    " max_len: int, causal: bool, eps: float -> out[T, H, E]; den[T, H]: acc",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("q", "k", "v", "norm_q", "norm_k"),
    saves=("q", "k", "v", "cu_seqlens", "norm_q", "norm_k", "out", "den"),
    refuse=refuse,
    ulps=2,  # the normaliser's gradient is a small difference of sums: 1.4 measured in fp32
    # dq and dk are differences of two sums; one of them uses `out`, which is rounded to 16 bits: 2.5 measured in fp16
    ulps_of={"dq": 4, "dk": 4},
    independent=("H", "G"),
    backends=("torch",),
    peers=True,
    cases=[*CASES, *BENCH],
)
