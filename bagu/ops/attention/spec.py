"""Attention over packed segments: each token's mix of the values of its segment, by how well query and key agree.

    s[i, j] = cap(scale * q[i] . k[j]) - slope * |i - j| + bias[R - 1 + clamp(j - i, ±(R - 1))]
    lse[i]  = log(exp(sink) + sum_j exp(s[i, j]))        out[i] = sum_j exp(s[i, j] - lse[i]) * v[j]

with cap(x) = softcap * tanh(x / softcap), for each head, over the keys j that query i attends to: the keys of its own
segment, with j <= i if `causal`, and with |i - j| < window if there is one. Token t belongs to the segment s with
cu_seqlens[s] <= t < cu_seqlens[s + 1]; a segment may be empty. Head h reads keys and values of group h // (H / G):
G = H is MHA, G = 1 is MQA, a number between is GQA.

`slopes` (ALiBi) are constants; `bias` is learned: T5's buckets are bias = table[:, bucket(distance)]. `sinks` are
learned: one logit per head that is added to the denominator and has no value (GPT-OSS). These terms and the softcap
(Gemma 2) are optional. A query that attends to no key and has no sink has out = 0 and lse = -inf. Split KV and ring
attention merge partial results by `lse`. It has no gradient, since fused kernels return none.

Dims: T = tokens, H = query heads, G = key heads, D = features of a key, E = of a value, S1 = segments + 1, P = 2R - 1.
Papers: https://arxiv.org/abs/1706.03762, 2205.14135 (IO-aware), 2305.13245 (GQA), 2108.12409 (ALiBi), 1910.10683 (T5),
2309.17453 (sinks), 2408.00118 (softcap)
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.ops.attention import flash
from bagu.ops.attention.choice import PREFER_TORCH, unsupported
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.contract.values import check_offsets, check_segments


class Args(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    slopes: torch.Tensor | None
    bias: torch.Tensor | None
    sinks: torch.Tensor | None
    max_len: int
    causal: bool
    window: int | None
    scale: float | None
    softcap: float | None


def reference(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, computed segment by segment."""
    k, v, scale = a.k, a.v, a.scale
    per_group, scale = a.q.shape[1] // k.shape[1], a.q.shape[-1] ** -0.5 if scale is None else scale
    k, v = k.repeat_interleave(per_group, 1), v.repeat_interleave(per_group, 1)
    outs, lses = [], []
    for begin, end in pairwise(a.cu_seqlens.tolist()):
        i = torch.arange(end - begin)[:, None]
        j = torch.arange(end - begin)[None, :]
        s = scale * torch.einsum("ihd,jhd->hij", a.q[begin:end], k[begin:end])
        if a.softcap is not None:
            s = a.softcap * torch.tanh(s / a.softcap)
        if a.slopes is not None:
            s = s - a.slopes[:, None, None] * (i - j).abs()
        if a.bias is not None:
            R = (a.bias.shape[1] + 1) // 2
            s = s + a.bias[:, R - 1 + (j - i).clamp(1 - R, R - 1)]
        seen = (j <= i) if a.causal else torch.ones_like(i - j, dtype=torch.bool)
        if a.window is not None:
            seen = seen & ((i - j).abs() < a.window)
        s = s.masked_fill(~seen, -torch.inf)
        lse = s.logsumexp(-1)
        if a.sinks is not None:
            lse = torch.logaddexp(lse, a.sinks[:, None])
        seen_any = lse.masked_fill(lse == -torch.inf, 0.0)  # -inf - -inf is NaN
        outs.append(torch.einsum("hij,jhe->ihe", (s - seen_any[..., None]).exp(), v[begin:end]))
        lses.append(lse.T)
    return torch.cat(outs), torch.cat(lses)


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    """The case gives the `lengths` of the segments, or S segments of length L."""
    lengths = case.get("lengths", (case.get("L", 1),) * case.get("S", 1))
    H, D = case["H"], case["D"]
    T, G, E = sum(lengths), case.get("G", H), case.get("E", D)
    q, k = streams.normal("q", T, H, D), streams.normal("k", T, G, D)
    if "loud" in case.params:  # adds one constant to all scores, which leaves the weights unchanged
        q[..., 0], k[..., 0] = case["loud"], 2.0
    heads = torch.arange(1, H + 1, dtype=torch.float64)
    return {
        "q": q,
        "k": k,
        "v": streams.normal("v", T, G, E),
        "cu_seqlens": torch.tensor((0, *lengths)).cumsum(0).to(torch.int32),
        "slopes": 2 ** (-8 * heads / H) if case.get("alibi", False) else None,
        "bias": streams.normal("bias", H, 2 * case["R"] - 1) if "R" in case.params else None,
        "sinks": streams.normal("sinks", H) if case.get("sinks", False) else None,
        "max_len": case.get("max_len", max(lengths)),
        "causal": case.get("causal", True),
        "window": case.get("window", None),
        "scale": case.get("scale", streams.choice("scale", None, 0.2)),
        "softcap": case.get("softcap", None),
    }


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for invalid calls that the signature cannot express."""
    check_segments("attention", dims, args["max_len"])
    if args["window"] is not None and args["window"] < 1:
        raise ArgumentError(
            f"attention: window is {args['window']}, and a query sees at least itself",
            hint="window = 1 is the query's own key; None is no window",
        )
    # fused kernels assume that the largest product gives the largest score
    if args["scale"] is not None and not args["scale"] > 0:
        raise ArgumentError(
            f"attention: scale is {args['scale']}, and a number above 0 is wanted", hint="None is 1 / sqrt(D)"
        )
    if args["softcap"] is not None and not args["softcap"] > 0:
        raise ArgumentError(
            f"attention: softcap is {args['softcap']}, and a number above 0 is wanted",
            hint="scores stay between -softcap and softcap; None is no cap",
        )
    if args["bias"] is not None and dims["P"] % 2 == 0:
        raise ArgumentError(
            f"attention: bias has {dims['P']} distances, and an odd number is wanted",
            hint="2R - 1 columns stand for the distances -(R - 1) … R - 1",
        )


def check_values(args: Mapping[str, Any], dims: Dims) -> None:
    check_offsets("attention", args["cu_seqlens"].tolist(), dims["T"], args["max_len"])


def pairs(dims: Mapping[str, Any]) -> int:
    """The number of (query, key) pairs: exact if segments have one length, a lower bound for other batches."""
    T, S = dims["T"], max(1, dims["S1"] - 1)
    L = T / S
    w = L if dims["window"] is None else min(dims["window"], L)
    before = w * (w + 1) / 2 + (L - w) * w  # sum over i of the keys at or before i that are inside the window
    return round(S * (before if dims["causal"] else 2 * before - L))


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Two products for each pair and head. q, k and v are read once; out and the fp32 lse are written once."""
    T, H, G, D, E = (dims[n] for n in "THGDE")
    return Cost(flops=2 * pairs(dims) * H * (D + E), bytes=T * (H + G) * (D + E) * itemsize + 4 * T * H)


def cost_backward(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Five products per pair: scores, dP, dV, dQ, dK. out, dout and lse are read too; dq, dk and dv are written."""
    T, H, G, D, E = (dims[n] for n in "THGDE")
    moved = T * (2 * H * D + 2 * H * E + 2 * G * (D + E)) * itemsize
    return Cost(flops=2 * pairs(dims) * H * (3 * D + 2 * E), bytes=moved + 4 * T * H)


RAGGED = (5, 1, 9, 9, 2)
CASES = [
    Case("even", "segments of one length run as one call, so a failure here is the math", S=2, L=4, H=2, D=8),
    Case("ragged", "lengths differ, one segment is a single token, two neighbours are equal", lengths=RAGGED, H=2, D=8),
    Case("single", "one segment is the whole batch", S=1, L=37, H=3, D=16),
    Case("padded", "cu_seqlens is filled up with T, and those segments are empty", lengths=(6, 3, 0, 0, 0), H=2, D=8),
    Case("hollow", "an empty segment stands first and in the middle", lengths=(0, 4, 0, 4, 3), H=2, D=8),
    Case("singletons", "most segments are one token and see only themselves: out is v", lengths=(1, 1, 4, 1), H=2, D=8),
    Case("slack", "max_len bounds the lengths and none reaches it", lengths=(3, 5), max_len=9, H=2, D=8),
    Case("gqa", "two query heads share a key head, and its gradient is their sum", lengths=RAGGED, H=4, G=2, D=8),
    Case("mqa", "all query heads share one key head", S=2, L=6, H=3, G=1, D=8),
    Case("bidirectional", "a query sees its whole segment", lengths=(18, 1, 8, 9), H=2, D=8, causal=False),
    Case("bidirectional_even", "the same, segments being of one length", S=3, L=6, H=2, D=8, causal=False),
    Case("window", "a query sees itself and two before it", lengths=RAGGED, H=2, D=8, window=3),
    Case("window_even", "the same in segments of one length, heads sharing keys", S=2, L=8, H=4, G=2, D=8, window=3),
    Case("window_wide", "the window is past the segment, so it hides nothing", lengths=(5, 3), H=2, D=8, window=99),
    Case("window_both", "without causal a window reaches both ways", lengths=RAGGED, H=2, D=8, window=2, causal=False),
    Case("window_pieces", "queries are several pieces, each with the keys its window reaches", lengths=(530, 40), H=1,
         D=8, window=70),
    Case("window_pieces_both", "the same, keys after a piece being seen as well", S=1, L=520, H=1, D=8, window=70,
         causal=False),
    Case("alibi", "each head has a slope of its own", lengths=RAGGED, H=4, G=2, D=8, alibi=True),
    Case("alibi_even", "slopes in segments of one length, seen from both sides", S=2, L=6, H=2, D=8, alibi=True,
         causal=False),
    Case("alibi_far", "slope times distance has more digits than bf16", S=1, L=300, H=2, D=8, alibi=True,
         mixed=["slopes"]),
    Case("bias", "a learned bias by distance, clamped at its ends, has a gradient", lengths=RAGGED, H=2, D=8, R=4),
    Case("bias_even", "the same in segments of one length, seen from both sides", S=2, L=6, H=4, G=2, D=8, R=9,
         causal=False),
    Case("bias_alibi", "slopes, bias and window at once, to the last column of the bias, which stays in fp32",
         lengths=RAGGED, H=2, D=8, R=3, alibi=True, window=4, causal=False, mixed=["bias"]),
    Case("sinks", "a sink takes weight from every key, and learns", lengths=RAGGED, H=4, G=2, D=8, sinks=True),
    Case("sinks_even", "the same through a window in segments of one length", S=2, L=6, H=2, D=8, sinks=True, window=3),
    Case("softcap", "scores are bent, some of them much, and so are gradients", lengths=RAGGED, H=2, D=8, softcap=0.7),
    Case("softcap_even", "the same in segments of one length, seen from both sides", S=2, L=6, H=4, G=2, D=8,
         softcap=2.0, causal=False),
    Case("softcap_wide", "a cap that bends nothing must not cost digits", S=1, L=9, H=2, D=16, softcap=1e3, scale=0.2),
    Case("everything", "cap, slopes, sinks and window at once, across blocks", lengths=(70, 3), H=2, G=1, D=16, E=8,
         softcap=1.5, alibi=True, sinks=True, window=40),
    Case("sinks_bias", "a sink and a cap beside a learned bias", S=2, L=5, H=2, D=8, R=3, sinks=True, softcap=3.0),
    Case("narrow_values", "a value is shorter than a key, as in MLA", lengths=RAGGED, H=2, D=24, E=16),
    Case("wide_values", "a value is longer than a key", S=2, L=6, H=2, D=8, E=20),
    Case("odd", "no size is a multiple of a block", lengths=(7, 13), H=3, D=11, E=5),
    Case("scale", "the scale is given and is not 1 / sqrt(D)", lengths=RAGGED, H=2, D=8, scale=0.3),
    Case("loud", "exp of these scores overflows unless the maximum is taken off", lengths=(9, 6), H=2, D=16,
         loud=256.0),
    Case("blocks", "segments are several blocks long and end inside one", lengths=(150, 33, 130), H=2, D=16),
    Case("no_tokens", "a batch with no token has empty results", lengths=(0, 0), H=2, D=8),
    Case("frozen_queries", "keys and values learn, and queries do not", lengths=(5, 3), H=2, G=1, D=8, frozen=["q"]),
    Case("frozen_keys", "queries learn, and keys and values do not", lengths=(5, 3), H=2, G=1, D=8, frozen=["k", "v"]),
    Case("head_128", "the most common head, grouped, in blocks of its own size", lengths=(150, 40), H=2, G=1, D=128,
         scale=None),
    Case("head_256", "the largest head that a tile has room for", lengths=(130, 20), H=1, D=256, scale=None),
    Case("head_192", "MLA's heads: keys of 192 and values of 128", lengths=(34, 3), H=1, D=192, E=128, scale=None),
    Case("head_80", "a head that is no power of two, in a wider tile", lengths=(70, 5), H=2, G=1, D=80, E=48,
         softcap=4.0, causal=False),
    Case("head_264", "a head that no tile has room for", lengths=(7, 3), H=2, G=1, D=264, E=16),
]  # fmt: skip
BIG: dict[str, Any] = {"H": 32, "G": 8, "D": 128, "bench": True}
ONE: dict[str, Any] = {"H": 16, "D": 128, "bench": True}
VARLEN = (1365, 819, 1912)
BENCH = [
    Case(
        "packed_16k", "documents of many lengths in 16k tokens", lengths=(3000, 700, 2048, 5000, 90, 1546, 4000), **BIG
    ),
    Case("llama_8b", "an 8B Llama 3 on eight sequences of 2k tokens", S=8, L=2048, **BIG),
    Case("long_16k", "one document of 16k tokens", S=1, L=16384, **BIG),
    Case("window_1k", "every second layer of a windowed model", S=1, L=16384, window=1024, **BIG),
    Case("varlen_4k", "the bar of packed training: thirds, fifths and the rest of 4k", lengths=VARLEN * 4, **ONE),
    Case("varlen_16k", "the bar of packed training: the same of 16k", lengths=tuple(4 * n for n in VARLEN), **ONE),
    Case("equal_4k", "the bar of equal segments, four of 4k", S=4, L=4096, **ONE),
    Case("equal_16k", "the bar of equal segments, one of 16k", S=1, L=16384, **ONE),
    Case("varlen_d64", "packed training with heads of 64", lengths=VARLEN * 4, H=32, D=64, bench=True),
    Case(
        "sinks_1k",
        "every second layer of GPT-OSS: a window of 128, sinks",
        lengths=VARLEN * 4,
        H=64,
        G=8,
        D=64,
        window=128,
        sinks=True,
        bench=True,
    ),
    Case(
        "softcap_4k",
        "Gemma 2: capped scores, heads of 256",
        lengths=VARLEN * 4,
        H=8,
        G=4,
        D=256,
        softcap=50.0,
        bench=True,
    ),
    Case("mla", "DeepSeek-V3's training form: keys of 192, values of 128", S=2, L=4096, H=32, D=192, E=128, bench=True),
    Case("laptop", "bagu's demo: sixteen sequences of 256 tokens", S=16, L=256, H=4, D=64, bench=True),
]

SPEC = OpSpec(
    name="attention",
    signature="q[T, H, D], k[T, G, D], v[T, G, E], cu_seqlens[S1]: i32, slopes[H]?: float, bias[H, P]?: float,"
    " sinks[H]?: float, max_len: int, causal: bool, window: int?, scale: float?, softcap: float?"
    " -> out[T, H, E], lse[T, H]: acc",
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    cost_backward=cost_backward,
    grads=("q", "k", "v", "bias", "sinks"),
    saves=("q", "k", "v", "cu_seqlens", "slopes", "bias", "sinks", "out", "lse"),
    constant=("lse",),
    refuse=refuse,
    check_values=check_values,
    # Fused kernels round the weights and dS to 16 bits before their products. Measured over the cases on a CPU: 2.7;
    # lse on an H200: 2.0 (torch), 1.0 (Triton).
    ulps=4,
    # They compute rowsum(dP * P) from the rounded out: 4.3 in "window_pieces", 4 to 6 at 4096 tokens of 4 heads
    ulps_of={"dq": 6},
    torch_cpu_ulps_of={"lse": flash.LSE_ULPS},
    # measured: with a few spills these tiles are 1.3 to 1.7 times as fast as the largest that have none (journal 004)
    spills={"dkdv_kernel": 60},
    nonempty=("D",),
    independent=("H", "G"),
    unsupported=unsupported,
    prefer_torch=PREFER_TORCH,
    peers=True,
    cases=[*CASES, *BENCH],
)
