"""Sampling: one token per row of logits, with temperature, min-p, top-k and top-p.

    x[v]    = logits[s, v], or values[s, a] where ids[s, a] = v (penalties and biases, which change few tokens);
              -inf where allowed[s, v // 32] has no bit v % 32 (the mask of a grammar)
    w[v]    = exp((x[v] - max x) / temperature[s])
    kept    = tokens v with   w[v] >= min_p                                                        (min-p)
                        and   fewer than top_k tokens above x[v]                                   (top-k)
                        and   mass of the tokens above x[v] < top_p * mass of the top_k tokens     (top-p)
    token   = the first kept token at which the running sum of w exceeds u * (sum of w over the kept tokens)

The mass of tokens is the sum of their w, among those that min-p keeps. The largest x is always kept. Tokens with equal
x are all kept or all dropped. The running sum goes over the vocabulary without the replaced tokens, then over the
replaced ones. Temperature 0 gives the token of the largest x, of several the first. The mode is chosen by each row's
values, so greedy and random rows may share a call.

The token depends on its own row alone, and sums are split by V alone: a row gives the same token in any batch, also in
invariant mode. `u` is the caller's random number; the engine computes it from (seed, choice, position). A row without a
finite largest logit (NaN, inf, or only -inf) gives a token in [0, V).

Dims: S = rows (sequences), V = vocabulary, A = replaced logits of a row, B = words of 32 bits.
Papers: https://arxiv.org/abs/1904.09751 (top-p), https://arxiv.org/abs/2407.01082 (min-p)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.ops.contract.core import Case, Cost, OpSpec, Streams
from bagu.ops.contract.signature import Dims
from bagu.ops.contract.values import check_range


class Args(NamedTuple):
    logits: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    u: torch.Tensor
    ids: torch.Tensor | None
    values: torch.Tensor | None
    allowed: torch.Tensor | None


def reference(a: Args) -> torch.Tensor:
    """The definition, one row after another."""
    tokens = a.logits.new_zeros(len(a.logits))
    for s, row in enumerate(a.logits):
        order = list(range(len(row)))
        if a.ids is not None and a.values is not None:
            replaced = [i for i in a.ids[s].tolist() if i >= 0]
            row = row.index_copy(0, a.ids.new_tensor(replaced), a.values[s, : len(replaced)])
            order = [*sorted({*order} - {*replaced}), *replaced]
        if a.allowed is not None:
            has_bit = [bool(int(a.allowed[s, v // 32]) >> v % 32 & 1) for v in range(len(row))]
            row = row.where(torch.tensor(has_bit, device=row.device), -torch.inf)
        tokens[s] = _token(row, order, a.temperature[s], int(a.top_k[s]), a.top_p[s], a.min_p[s], a.u[s])
    return tokens


def _token(
    x: torch.Tensor,
    order: list[int],
    temperature: torch.Tensor,
    k: int,
    p: torch.Tensor,
    least: torch.Tensor,
    u: torch.Tensor,
) -> int:
    if temperature == 0:
        return int(x.argmax())
    w = torch.exp((x - x.max()) / temperature)
    passed = torch.where(x >= x.max() + temperature * torch.log(least), w, 0.0)
    ranked = passed.sort(descending=True).values
    total = ranked[:k].sum()
    count = torch.searchsorted(x.sort().values, x, right=True).neg() + len(x)  # of tokens above each token
    mass = torch.cat([ranked.new_zeros(1), ranked.cumsum(0)])[count]
    inside = (passed > 0) & (count < k) & ((mass < p * total) | (p == 1))
    kept = inside | (count == 0)
    chain = torch.tensor(order, device=x.device)
    chain = chain[kept[chain]]
    sums = w[chain].cumsum(0)
    return int(chain[(sums <= u * sums[-1]).sum().clamp(max=len(chain) - 1)])


def refuse(args: Mapping[str, Any], dims: Dims) -> None:
    """Raise for arguments that are invalid in ways the signature cannot check."""
    if (args["ids"] is None) != (args["values"] is None):
        given, missing = ("ids", "values") if args["values"] is None else ("values", "ids")
        raise ArgumentError(
            f"sample: {given} is given without {missing}",
            hint="values[s, a] is the logit of token ids[s, a]: give both or neither",
        )
    if args["allowed"] is not None and 32 * dims["B"] < dims["V"]:
        raise ArgumentError(
            f"sample: allowed has {dims['B']} words of 32 bits for {dims['V']} tokens",
            hint=f"it needs {-(-dims['V'] // 32)}",
        )


def check_values(args: Mapping[str, Any], dims: Dims) -> None:
    if args["ids"] is not None:
        check_range("sample", "ids", args["ids"].clamp(min=0), dims["V"], "the vocabulary")


def inputs(case: Case, streams: Streams) -> dict[str, Any]:
    S, V = case["S"], case["V"]
    logits = case.get("spread", 3.0) * streams.normal("logits", S, V)
    if "peak" in case.params:
        logits[:, -1] = case["peak"]
    given = {name: _per_row(case, streams, name, S) for name in ("temperature", "top_p", "min_p")}
    args = {
        "logits": logits,
        "temperature": given["temperature"],
        "top_k": (torch.tensor(case.get("top_k", [V]), dtype=torch.int64).repeat(S)[:S]).to(logits.device),
        "top_p": given["top_p"],
        "min_p": given["min_p"],
        "u": streams.uniform("u", S),
        "ids": None,
        "values": None,
        "allowed": _allowed(streams, S, V, case["allowed"]) if "allowed" in case.params else None,
    }
    if A := case.get("A", 0):
        args |= _replacements(streams, S, V, A, case.get("used", A), case.get("lift", 4.0))
    return args


USUAL = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}


def _per_row(case: Case, streams: Streams, name: str, S: int) -> torch.Tensor:
    """The values that the case lists, repeated over the rows. On the stream's device, also for meta tensors."""
    listed = torch.tensor(case.get(name, [USUAL[name]]), dtype=torch.float64)
    like = streams.normal(name, S)
    return listed.repeat(S)[:S].to(like.device)


def _replacements(streams: Streams, S: int, V: int, A: int, used: int, lift: float) -> dict[str, torch.Tensor]:
    """Different ascending ids for each row, the last A - used of them unused; rows with an odd index have no others."""
    drawn = streams.normal("ids", S, V)
    ids = drawn.argsort(-1)[:, :A].sort(-1).values
    ids[:, used:] = -1
    ids[1::2, max(used // 2, 1) :] = -1
    return {"ids": ids, "values": lift + 2 * streams.normal("values", S, A)}


def _allowed(streams: Streams, S: int, V: int, share: float) -> torch.Tensor:
    """Bits for about this share of the tokens, and for the last token of each row."""
    words = -(-V // 32)
    bits = streams.uniform("allowed", S, words, 32) < share
    bits[:, (V - 1) // 32, (V - 1) % 32] = True
    powers = 1 << torch.arange(32, device=bits.device)
    return (bits * powers).sum(-1).to(torch.int32)  # keeps the lower 32 bits


def cost(dims: Mapping[str, int], itemsize: int) -> Cost:
    """Subtract, scale, exp, add and compare per token; each logit is read once."""
    S, V = dims["S"], dims["V"]
    return Cost(flops=5 * S * V, bytes=S * V * itemsize + 36 * S)


TEMPERATURES = [0.7, 1.3, 1.0]
SPEC = OpSpec(
    name="sample",
    signature=(
        "logits[S, V], temperature[S]: acc, top_k[S]: i64, top_p[S]: acc, min_p[S]: acc, u[S]: acc, ids[S, A]?: i64, "
        "values[S, A]?: acc, allowed[S, B]?: i32 -> token[S]: i64"
    ),
    args=Args,
    reference=reference,
    inputs=inputs,
    cost=cost,
    refuse=refuse,
    check_values=check_values,
    ulps=0,
    # Triton 3.7: 80 registers, with which three programs fit on an SM, and spills outside every loop. Triton 3.6: 93
    # registers, no spills
    spills={"_choose": 21},
    nonempty=("V",),
    independent=("S",),
    cases=[
        Case("even", "one random number per row, nothing filtered", S=8, V=64),
        Case("ragged", "each row has filters of its own, and one row is greedy", S=5, V=123, top_k=[123, 7, 30],
             temperature=[0.7, 1.3, 0.0, 1.0], top_p=[1.0, 0.8], min_p=[0.0, 0.0, 0.1, 0.0, 0.02]),
        Case("greedy", "no row draws: the largest logit of each", S=5, V=77, temperature=[0.0]),
        Case("temperature", "several temperatures over several groups", S=6, V=1031, temperature=TEMPERATURES),
        Case("top_k", "a few tokens of many groups are kept", S=4, V=2050, top_k=[1, 2, 5, 40]),
        Case("large_k", "more tokens are kept than there are groups", S=3, V=400, top_k=[100, 399, 250]),
        Case("top_p", "the nucleus is a few tokens", S=3, V=1505, top_p=[0.5, 0.9, 0.1], temperature=TEMPERATURES),
        Case("flat_top_p", "the nucleus is most of the vocabulary", S=3, V=1102, spread=0.1, top_p=[0.9, 0.99, 0.6]),
        Case("min_p", "the threshold follows from the largest logit", S=4, V=1301, min_p=[0.05, 0.5, 1.0, 0.001]),
        Case("all", "top-p applies to the mass that min-p and top-k leave", S=6, V=1000, min_p=[0.01, 0.1],
             top_k=[20, 5, 1000, 300], top_p=[0.6, 0.9, 0.3], temperature=TEMPERATURES),
        Case("replaced", "replaced logits, more in one row than in the next", S=4, V=300, A=24, used=20),
        Case("replaced_filters", "replaced logits are filtered with the others", S=4, V=700, A=40, top_k=[30, 700],
             top_p=[0.9, 0.7, 1.0], min_p=[0.0, 0.0, 0.0, 0.05], temperature=TEMPERATURES),
        Case("replaced_greedy", "the largest logit is a replaced one in some rows", S=10, V=200, A=3, lift=8.0,
             temperature=[0.0]),
        Case("replaced_all", "every token of some rows is replaced", S=4, V=24, A=24, top_p=[0.8, 1.0]),
        Case("masked", "a token in four may be sampled", S=4, V=333, allowed=0.25, temperature=[1.0, 0.0, 0.5, 2.0]),
        Case("masked_filters", "filters see only the allowed tokens, few of them in a row", S=4, V=1100, allowed=0.02,
             top_k=[4, 1100], top_p=[0.9, 0.7, 1.0], min_p=[0.0, 0.0, 0.0, 0.05]),
        Case("masked_replaced", "replaced tokens are masked too", S=6, V=300, A=24, used=20, allowed=0.3,
             temperature=[1.0, 0.0], lift=6.0),
        Case("tiles", "a row is more than one tile of groups", S=2, V=17000, top_k=[17000, 60], top_p=[1.0, 0.9]),
        Case("full_tile", "the last group of the last tile holds the largest logit", S=3, V=8192, peak=16.0,
             temperature=[0.0, 0.5], top_k=[8192, 8192, 5]),
        Case("one", "a vocabulary of one token", S=3, V=1, top_p=[0.5], min_p=[0.3]),
        Case("empty", "there is no row, and nothing is launched", S=0, V=24),
        Case("qwen", "256 sequences at temperature 1", bench=True, S=256, V=151936),
        Case("qwen_top", "256 sequences with top-k and top-p", bench=True, S=256, V=151936, top_k=[50], top_p=[0.9]),
        Case("qwen_alone", "one sequence at temperature 1", bench=True, S=1, V=151936),
        Case("qwen_masked", "32 sequences whose grammars allow half of the tokens", bench=True, S=32, V=151936,
             allowed=0.5),
        Case("qwen_penalties", "256 sequences with 512 penalties each", bench=True, S=256, V=151936, A=512),
    ],
)  # fmt: skip
