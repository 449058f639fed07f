"""Sampling in PyTorch: a formula for tracing and for GPUs without Triton, and passes that skip work in eager CPU calls.

Both follow the definition in spec.py. Sums that locate a token are fp64, so that their order matters little. Sums that
are compared with top_p times a mass are rounded to the dtype of that product.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from bagu.ops.call import eager
from bagu.ops.contract.signature import accumulator
from bagu.ops.sample.spec import Args

GROUP = 128  # tokens whose weights are added first when a token is located; the Triton backend has the same groups
BELOW_ONE = 1 - 2.0**-24  # u may round to 1 in fp32, and no running sum exceeds the total
FEW = 256  # the number of largest logits that top-p sorts first on a CPU


@torch.no_grad()  # a token has no gradient
def forward(a: Args) -> tuple[torch.Tensor]:
    logits, top_k, ids, values = a.logits, a.top_k, a.ids, a.values
    V, x = logits.shape[1], logits
    if a.allowed is not None:
        x = _masked(logits, a.allowed)
        if ids is not None and values is not None:
            values = values.where(_unpacked(a.allowed, V).gather(1, ids.clamp(min=0)), -torch.inf)
    if ids is not None and values is not None:
        x = _extended(x, ids, values)
        top_k = top_k.where(top_k < V, x.shape[1])
    filters = (a.temperature, top_k, a.top_p, a.min_p, a.u)
    if not eager.plain(logits):
        drawn = _tokens(_draw_by_sort(x, *filters), ids, V)
        return (torch.where(a.temperature > 0, drawn, _largest(x, ids, V)),)
    rows = torch.from_numpy(np.flatnonzero(_numpy(a.temperature)))
    if not len(rows):
        return (_largest(x, ids, V),)
    if len(rows) == len(x):
        return (_tokens(_draw(x, *filters), ids, V),)
    greedy = _largest(x, ids, V)
    drawn = _draw(*(t[rows] for t in (x, *filters)))
    return (greedy.index_copy(0, rows, _tokens(drawn, None if ids is None else ids[rows], V)),)


invariant_forward = forward  # a row's token does not depend on the batch


def _masked(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """The logits, -inf where a token is not allowed. In eager calls on a CPU with 8 terms for each byte of the mask: 32
    rows of 8192 take 0.28 ms on a Neoverse-N1, and torch.where 1.1."""
    V = logits.shape[1]
    if not eager.plain(logits):
        return torch.where(_unpacked(allowed, V), logits, -torch.inf)
    bytes_ = _numpy(allowed.contiguous()).view(np.uint8)
    terms = np.take(_terms_of_bytes(logits.dtype == torch.float64), bytes_, axis=0, mode="clip")
    return torch.from_numpy(terms.reshape(len(allowed), -1)[:, :V]).add_(logits)


@cache
def _terms_of_bytes(wide: bool) -> np.ndarray:
    """[256, 8] fp32, or fp64 if `wide`: for each bit of a byte, lowest first, 0 if it is set and -inf if not."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits == 1, 0.0, -np.inf).astype(np.float64 if wide else np.float32)


def _unpacked(allowed: torch.Tensor, V: int) -> torch.Tensor:
    """The bits of allowed[S, B] as bools [S, V]."""
    bits = allowed.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=allowed.device)
    return (bits & 1).flatten(1)[:, :V] != 0


def _extended(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The logits in the order of the running sum: replaced tokens are -inf, and their values follow the vocabulary."""
    V, used = logits.shape[1], ids >= 0
    x = torch.cat([logits.to(values.dtype), values.where(used, -torch.inf)], 1)
    unused = torch.arange(V, V + ids.shape[1], device=ids.device)  # each unused entry has its own place, which is -inf
    return x.scatter(1, ids.where(used, unused), -torch.inf)


def _tokens(entry: torch.Tensor, ids: torch.Tensor | None, V: int) -> torch.Tensor:
    """The tokens of entries of `_extended`."""
    if ids is None:
        return entry
    replaced = ids.gather(1, (entry - V).clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(entry < V, entry, replaced).clamp(min=0)


def _largest(x: torch.Tensor, ids: torch.Tensor | None, V: int) -> torch.Tensor:
    """The first token with the largest logit of each row."""
    first = argmax(x[:, :V])
    if ids is None:
        return first
    other = argmax(x[:, V:])
    a, b = x.gather(1, first.unsqueeze(1)).squeeze(1), x[:, V:].gather(1, other.unsqueeze(1)).squeeze(1)
    replaced = ids.gather(1, other.unsqueeze(1)).squeeze(1)
    return torch.where((b > a) | ((b == a) & (replaced < first) & (replaced >= 0)), replaced, first)


def argmax(x: torch.Tensor) -> torch.Tensor:
    """The first largest value of each row. On a CPU with numpy: 32 rows of 8192 take 21 us (86 us inside a step, after
    the weights have evicted them from the CPU's caches); torch takes 600 us."""
    return torch.from_numpy(_numpy(x.float()).argmax(-1)) if eager.plain(x) else x.argmax(-1)


def _numpy(x: torch.Tensor) -> Any:
    return x.detach().resolve_neg().numpy()


# --- the formula ------------------------------------------------------------------------------------------------------


def _draw_by_sort(
    x: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    u: torch.Tensor,
) -> torch.Tensor:
    """The entry that each row draws: a sort for every row, whatever its filters are."""
    x, hot = x.to(accumulator(x.dtype)), torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    ranked = x.sort(-1, descending=True).values
    top = ranked[:, :1]
    outside = ranked < _least_by_min_p(top, hot, min_p)
    outside = outside | (torch.arange(x.shape[1], device=x.device) >= top_k.unsqueeze(1))
    weights = ((ranked - top) / hot).exp().masked_fill(outside, 0.0)
    least = _least(ranked, weights, outside, top_p, weights.sum(-1, keepdim=True, dtype=torch.float64))
    kept = ((x - top) / hot).exp().masked_fill(x < least, 0.0)
    sums = kept.cumsum(-1, dtype=torch.float64)
    target = u.double().clamp(max=BELOW_ONE).unsqueeze(1) * sums[:, -1:]
    entry = torch.searchsorted(sums, target, right=True).squeeze(1)
    return torch.where(sums[:, -1] > 0, entry, x.argmax(-1)).clamp(max=x.shape[1] - 1)


def _least_by_min_p(top: torch.Tensor, hot: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """[S, 1]: the logit whose weight is min_p."""
    return top + hot * torch.log(min_p.unsqueeze(1))


def _least(
    ranked: torch.Tensor, weights: torch.Tensor, outside: torch.Tensor, top_p: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """[S, 1]: the smallest logit that is kept, from logits in descending order, their weights (0 where `outside`
    min-p or top-k) and the mass to which top_p refers."""
    above = (weights.cumsum(-1, dtype=torch.float64) - weights).to(weights.dtype)
    share = top_p.unsqueeze(1)
    past = (share < 1.0) & (above >= share * total.to(weights.dtype))
    count = (outside | past).logical_not().sum(-1, keepdim=True)
    return ranked.gather(1, (count - 1).clamp(min=0))  # the largest is kept, also if top_p rounds to 0


# --- passes for eager calls on a CPU ----------------------------------------------------------------------------------


def _draw(
    x: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    u: torch.Tensor,
) -> torch.Tensor:
    """The entry that each row draws. Only rows with filters are filtered."""
    x, hot = x.to(accumulator(x.dtype)), temperature.unsqueeze(1)
    top = x.amax(-1, keepdim=True)
    w = x.sub(top).mul_(hot.reciprocal()).exp_()
    filters = (_numpy(top_k) < x.shape[1]) | (_numpy(top_p) < 1.0) | (_numpy(min_p) > 0.0)
    rows = torch.from_numpy(np.flatnonzero(filters))
    if len(rows) == len(x):
        w = _filter(x, w, top, hot, top_k, top_p, min_p)
    elif len(rows):
        w.index_copy_(0, rows, _filter(*(t[rows] for t in (x, w, top, hot, top_k, top_p, min_p))))
    return _locate(w, u)


def _filter(
    x: torch.Tensor,
    w: torch.Tensor,
    top: torch.Tensor,
    hot: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """w, 0 where a token is not kept. The products are numpy's: 0.2 ms for 32 rows of 8192, and torch's where 0.6."""
    least = _least_by_min_p(top, hot, min_p)
    ranks = ((top_k < x.shape[1]) | (top_p < 1.0)).unsqueeze(1)
    if bool(ranks.any()):
        passed = torch.from_numpy(_numpy(w) * (_numpy(x) >= _numpy(least))) if bool((min_p > 0.0).any()) else w
        found = _least_by_rank(x, passed, top, hot, top_k, top_p, least)
        least = torch.where(ranks, torch.maximum(least, found), least)
    return torch.from_numpy(_numpy(w) * (_numpy(x) >= _numpy(least)))


def _least_by_rank(
    x: torch.Tensor,
    passed: torch.Tensor,
    top: torch.Tensor,
    hot: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    least: torch.Tensor,
) -> torch.Tensor:
    """[S, 1]: the smallest logit that top-k and top-p keep, of those that min-p keeps (weights `passed`). Sorts the
    `FEW` largest logits first, and more if the nucleus of a row without top-k is larger."""
    V = x.shape[1]
    limited = (top_k < V).unsqueeze(1)
    whole = _group_sums(passed).sum(-1, keepdim=True, dtype=torch.float64)
    count = int(torch.where(top_k < V, top_k, FEW).max())
    while True:
        count = min(count, V)
        ranked = x.topk(count).values
        outside = (ranked < least) | (torch.arange(count) >= top_k.unsqueeze(1))
        weights = ranked.sub(top).div_(hot).exp_().masked_fill_(outside, 0.0)
        total = torch.where(limited, weights.sum(-1, keepdim=True, dtype=torch.float64), whole)
        found = _least(ranked, weights, outside, top_p, total)
        more = ~limited & (top_p < 1.0).unsqueeze(1) & (found == ranked[:, -1:])
        if count == V or not bool(more.any()):
            return found
        count *= 8


def _group_sums(w: torch.Tensor) -> torch.Tensor:
    """The sums of each row's groups of 128."""
    whole = w.shape[1] // GROUP * GROUP
    sums = w[:, :whole].unflatten(1, (-1, GROUP)).sum(-1)
    return sums if whole == w.shape[1] else torch.cat([sums, w[:, whole:].sum(-1, keepdim=True)], 1)


def _locate(w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first entry at which the running sum of a row exceeds u times its sum: first the group, then in the group.
    With numpy, whose small operations take 2 us and torch's 10."""
    (S, V), sums = w.shape, _numpy(_group_sums(w)).cumsum(-1, dtype=np.float64)
    target = np.minimum(_numpy(u), BELOW_ONE, dtype=np.float64) * sums[:, -1]
    group = (sums <= target[:, None]).sum(-1).clip(max=sums.shape[1] - 1)
    row = np.arange(S)
    before = np.where(group > 0, sums[row, group - 1], 0.0)
    entries = group[:, None] * GROUP + np.arange(GROUP)
    inside = _numpy(w).take(entries.clip(max=V - 1) + V * row[:, None])
    if V % GROUP:
        inside[entries >= V] = 0.0
    inside = inside.cumsum(-1, dtype=np.float64)
    rest = np.minimum(target - before, inside[:, -1] * BELOW_ONE)
    entry = (group * GROUP + (inside <= rest[:, None]).sum(-1)).clip(max=V - 1)
    found = sums[:, -1] > 0  # False for NaN
    return torch.from_numpy(entry if found.all() else np.where(found, entry, _numpy(w).argmax(-1)))
