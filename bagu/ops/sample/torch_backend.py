"""Sampling in PyTorch: a formula for tracing and GPUs without Triton, and passes that skip work for eager CPU calls.

Both follow the definition in spec.py. Sums that locate a token are fp64, so that their order matters little; sums that
are compared with top_p are rounded to fp32 (for fp32 logits), as the product they are compared with.
"""

from __future__ import annotations

from typing import Any

import torch

from bagu.ops import eager
from bagu.ops.signature import accumulator

__all__ = ["forward", "invariant_forward"]

GROUP = 128  # tokens whose weights are added first when a token is located; the Triton backend has the same groups
BELOW_ONE = 1 - 2.0**-24  # a random number may round to 1 in fp32, and no sum exceeds the total
FEW = 256  # top-p on a CPU first sorts this many of the most probable tokens


@torch.no_grad()  # a token has no gradient
def forward(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
    u: torch.Tensor, ids: torch.Tensor | None, values: torch.Tensor | None,
) -> tuple[torch.Tensor]:  # fmt: skip
    x, tokens = _replaced(logits, ids, values)
    greedy = _largest(x, tokens)
    if not eager.plain(logits):
        drawn = _draw_by_sort(x, temperature, top_k, top_p, min_p, u)
        found = torch.where(temperature > 0, _token(tokens, drawn), greedy)
        return (found,)
    rows = (temperature > 0).nonzero().squeeze(1)
    if not len(rows):
        return (greedy,)
    drawn = _draw(*(t if len(rows) == len(t) else t[rows] for t in (x, temperature, top_k, top_p, min_p, u)))
    return (greedy.index_copy(0, rows, _token(None if tokens is None else tokens[rows], drawn)),)


invariant_forward = forward  # a row's token does not depend on the batch


def _replaced(
    logits: torch.Tensor, ids: torch.Tensor | None, values: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits in the order of the running sum, and the token of each entry (None: its index). Replaced tokens are -inf
    in their place and follow the vocabulary."""
    if ids is None or values is None:
        return logits, None
    S, V = logits.shape
    used = ids >= 0
    replaced = torch.zeros(S, V + 1, dtype=torch.bool, device=logits.device).scatter(1, ids.where(used, V), True)
    kept = logits.to(values.dtype).masked_fill(replaced[:, :V], -torch.inf)
    places = torch.arange(V, device=logits.device).expand(S, V)
    return torch.cat([kept, values.where(used, -torch.inf)], 1), torch.cat([places, ids.where(used, 0)], 1)


def _token(tokens: torch.Tensor | None, entry: torch.Tensor) -> torch.Tensor:
    return entry if tokens is None else tokens.gather(1, entry.unsqueeze(1)).squeeze(1)


def _largest(x: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    """The first token with the largest logit of each row. On a CPU with numpy: 32 rows of 8192 take 21 us (86 us inside
    a step, after the weights have evicted them from the CPU's caches); torch takes 600 us."""
    if tokens is not None:
        largest = x == x.amax(-1, keepdim=True)
        return tokens.where(largest, tokens.shape[1]).amin(-1) % tokens.shape[1]  # 0 for a row of NaN
    return torch.from_numpy(_numpy(x.float()).argmax(-1)) if eager.plain(x) else x.argmax(-1)


def _numpy(x: torch.Tensor) -> Any:
    return x.detach().resolve_neg().numpy()


# --- the formula ------------------------------------------------------------------------------------------------------


def _draw_by_sort(
    x: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
    u: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The entry that each row draws: everything by one sort, whatever the filters are."""
    acc = accumulator(x.dtype)
    hot = torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    ranked = x.to(acc).sort(-1, descending=True).values
    weights = ((ranked - ranked[:, :1]) / hot).exp()
    outside = ranked < _min_p_threshold(ranked[:, :1], hot, min_p)
    outside = outside | (torch.arange(x.shape[1], device=x.device) >= top_k.unsqueeze(1))
    least = _least(ranked, weights.masked_fill(outside, 0.0), outside, top_p)
    kept = ((x.to(acc) - ranked[:, :1]) / hot).exp().masked_fill(x < least, 0.0)
    sums = kept.cumsum(-1, dtype=torch.float64)
    target = u.double().clamp(max=BELOW_ONE).unsqueeze(1) * sums[:, -1:]
    entry = torch.searchsorted(sums, target, right=True).squeeze(1)
    return torch.where(sums[:, -1] > 0, entry, x.argmax(-1)).clamp(max=x.shape[1] - 1)


def _min_p_threshold(top: torch.Tensor, hot: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The logit at which w is min_p, for each row."""
    return top + hot * torch.log(min_p.unsqueeze(1))


def _least(
    ranked: torch.Tensor, weights: torch.Tensor, outside: torch.Tensor, top_p: torch.Tensor,
    total: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The smallest kept logit of each row, from logits in descending order and their weights, 0 where `outside`.
    `total` is the mass that top_p refers to; by default that of `weights`."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:] if total is None else total
    limit = top_p.unsqueeze(1) * total.to(weights.dtype)
    past = (top_p.unsqueeze(1) < 1.0) & ((sums - weights).to(weights.dtype) >= limit)
    count = (outside | past).logical_not().sum(-1, keepdim=True).clamp(min=1)
    return ranked.gather(1, count - 1)


# --- passes for eager calls on a CPU ----------------------------------------------------------------------------------


def _draw(
    x: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
    u: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The entry that each row draws. A row is sorted only as far as its filters need it."""
    acc, S = accumulator(x.dtype), len(x)
    x = x.to(acc)
    top = torch.from_numpy(_numpy(x).max(-1, keepdims=True))
    w = x.sub(top).div_(temperature.unsqueeze(1)).exp_()
    filtered = ((top_k < x.shape[1]) | (top_p < 1.0) | (min_p > 0.0)).nonzero().squeeze(1)
    if len(filtered):
        every = len(filtered) == S
        args = (t if every else t[filtered] for t in (x, w, top, temperature, top_k, top_p, min_p))
        kept = _filter(*args)
        w = kept if every else w.index_copy(0, filtered, kept)
    return _locate(w, u)


def _filter(
    x: torch.Tensor, w: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor,
    top_p: torch.Tensor, min_p: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """w, 0 where a token is not kept."""
    least = _min_p_threshold(top, temperature.unsqueeze(1), min_p)
    sort = (top_k < x.shape[1]) | (top_p < 1.0)
    if not bool(sort.any()):
        return w.masked_fill(x < least, 0.0)
    unlimited = top_k >= x.shape[1]
    whole = w.masked_fill(x < least, 0.0) if bool(((min_p > 0.0) & unlimited).any()) else w
    total = _group_sums(whole).sum(-1, keepdim=True) if bool(unlimited.any()) else None
    count = FEW if bool((sort & unlimited).any()) else 0
    count = max(count, int(torch.where(unlimited, 0, top_k).max()))
    while True:
        count = min(count, x.shape[1])
        found, covered = _sorted_least(x, top, temperature, top_k, top_p, least, count, total)
        if covered or count == x.shape[1]:
            return w.masked_fill(x < found, 0.0)
        count *= 8


def _sorted_least(
    x: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    least: torch.Tensor, count: int, total: torch.Tensor | None,
) -> tuple[torch.Tensor, bool]:  # fmt: skip
    """The smallest kept logit of each row, from its `count` largest ones, and whether these were enough."""
    ranked = x.topk(count, -1).values
    outside = (ranked < least) | (torch.arange(count) >= top_k.unsqueeze(1))
    weights = ranked.sub(top).div_(temperature.unsqueeze(1)).exp_().masked_fill_(outside, 0.0)
    if total is None:
        return torch.maximum(_least(ranked, weights, outside, top_p), least), True
    limited = top_k < x.shape[1]
    total = torch.where(limited.unsqueeze(1), weights.sum(-1, keepdim=True, dtype=torch.float64), total)
    found = _least(ranked, weights, outside, top_p, total)
    no_top_p = ~limited & (top_p >= 1.0)
    short = ~limited & ~no_top_p & (found == ranked[:, -1:]).squeeze(1)
    found = torch.where(no_top_p.unsqueeze(1), least, torch.maximum(found, least))
    return found, not bool(short.any())


def _group_sums(w: torch.Tensor) -> torch.Tensor:
    """fp64 sums of each row's groups of 128."""
    whole = w.shape[1] // GROUP * GROUP
    sums = w[:, :whole].unflatten(1, (-1, GROUP)).sum(-1)
    return torch.cat([sums, w[:, whole:].sum(-1, keepdim=True)], 1).double()


def _locate(w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first entry at which the running sum of a row exceeds u times its sum: first the group, then in the group."""
    V = w.shape[1]
    sums = _group_sums(w).cumsum(-1)
    target = u.double().clamp(max=BELOW_ONE).unsqueeze(1) * sums[:, -1:]
    group = torch.searchsorted(sums, target, right=True).clamp(max=sums.shape[1] - 1)
    before = torch.where(group > 0, sums.gather(1, (group - 1).clamp(min=0)), 0.0)
    entries = group * GROUP + torch.arange(GROUP)
    inside = w.gather(1, entries.clamp(max=V - 1)).masked_fill(entries >= V, 0.0).cumsum(-1, dtype=torch.float64)
    rest = torch.minimum(target - before, inside[:, -1:] * BELOW_ONE)
    place = torch.searchsorted(inside, rest, right=True)
    fallback = torch.from_numpy(_numpy(w).argmax(-1))  # without a finite sum
    return torch.where(sums[:, -1] > 0, (group * GROUP + place).squeeze(1), fallback).clamp(max=V - 1)
