"""Batch-invariant attention: one loop over tiles of keys for training, prefill, chunked prefill and decode.

A query processes the keys of its sequence in tiles of 64, positions 0 … 63 first, and updates its running maximum, sum
and weighted sum of values after each tile (online softmax). Tiles begin at multiples of 64 of the sequence, wherever a
chunk or a block begins. All products have one shape: 16 queries of a sequence by 64 keys for each head, zero-padded.

A tile that is fully masked for a query changes nothing, exactly: its weights are exp(-inf) = 0, and the running values
are multiplied by exp(0) = 1. So queries at different positions can share a product, and a decode, which has no later
keys, gives the same bits as training, which masks them. Sums are in fp32 (fp64 for fp64).

Keys and values are rows of two tables, and a function returns the row indices: the packed tokens of `attention`, or the
slots of a pool. Dims: I = groups of queries, R = 16, C = 64.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from bagu.ops.attention.shape import Shape
from bagu.ops.contract.signature import accumulator

# With 8 queries, 4 segments of 256 tokens take 36 ms instead of 20, and 32 decodes of 128 tokens 7.4 instead of 8.7 (4
# heads of 64, fp32, one core).
KEYS, QUERIES = 64, 16

Pair = tuple[torch.Tensor, torch.Tensor]
RowsOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (sequence[I], place[I, C]) -> row of the table[I, C]


def attend(
    shape: Shape,
    scale: float,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows_of: RowsOf,
    offsets: Sequence[int],
    lengths: Sequence[int],
) -> Pair:
    """out[T, H, E] and lse[T, H] of q[T, H, D] over rows of keys[·, G, D] and values[·, G, E].

    q[offsets[s] : offsets[s + 1]] are the last of the lengths[s] tokens of sequence s.
    """
    T, H, E, acc = q.shape[0], q.shape[1], values.shape[-1], accumulator(q.dtype)
    groups = _groups(shape, offsets, lengths)
    out, lse = q.new_empty(T, H, E), q.new_empty(T, H, dtype=acc)
    if not groups:
        return out, lse
    reaches = [reach for reach, *_ in groups]
    sequence, first, count, place = (torch.tensor(column) for column in list(zip(*groups, strict=True))[1:])
    turn = torch.arange(QUERIES)
    there = turn < count.unsqueeze(1)  # [I, R]
    rows = (first.unsqueeze(1) + turn).clamp(max=T - 1)
    at = place.unsqueeze(1) + turn
    state = _Running((q[rows].to(acc) * scale).transpose(1, 2).contiguous(), E, shape)
    last = torch.tensor(lengths)[sequence].unsqueeze(1) - 1
    seen_from = _seen_from(shape, offsets, lengths)[sequence].unsqueeze(1)
    for begin in range(0, reaches[-1] + 1, KEYS):
        live = bisect_left(reaches, begin)  # earlier groups attend to no key of this tile or later ones
        tile = torch.arange(begin, begin + KEYS)
        inside = torch.minimum(torch.maximum(tile, seen_from[live:]), last[live:])
        absent = inside != tile  # missing, or freed by a window: the memory may hold any values
        where = rows_of(sequence[live:], inside)
        k, v = (table[where].to(acc).masked_fill(absent[:, :, None, None], 0.0) for table in (keys, values))
        distance = tile - at[live:].unsqueeze(-1)  # [I, R, C]
        hidden, terms = shape.hidden(distance), shape.terms(distance, k)
        hidden = absent.unsqueeze(1).expand(distance.shape) if hidden is None else hidden | absent.unsqueeze(1)
        state.take(live, k, v, hidden.unsqueeze(1), None if terms is None else terms.transpose(0, 1))
    mixed, total = state.result()
    out[rows[there]], lse[rows[there]] = mixed.transpose(1, 2)[there].to(q.dtype), total.transpose(1, 2)[there]
    return out, lse


def _groups(shape: Shape, offsets: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int, int, int, int]]:
    """(last position attended to, sequence, first row, queries, first position) of each group, sorted."""
    found = []
    for s, ((begin, end), length) in enumerate(zip(pairwise(offsets), lengths, strict=True)):
        for row in range(begin, end, QUERIES):
            count, place = min(QUERIES, end - row), length - (end - row)
            found.append((place + count - 1 if shape.causal else length - 1, s, row, count, place))
    return sorted(found)


def _seen_from(shape: Shape, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """The first position of each sequence that any of its queries attends to."""
    new = torch.tensor(offsets).diff()
    past = torch.tensor(lengths) - new
    return torch.zeros_like(past) if shape.window is None else (past - shape.window + 1).clamp(min=0)


class _Running:
    """The running maximum, sum and weighted sum of values of queries q[I, H, R, D], which are already scaled.

    A sink is an initial score without a value.
    """

    def __init__(self, q: torch.Tensor, features: int, shape: Shape) -> None:
        self.q, self.shape = q, shape
        if shape.sinks is None:
            self.top, self.sum = q.new_full(q.shape[:3], -torch.inf), q.new_zeros(q.shape[:3])
        else:
            self.top = shape.sinks.to(q.dtype).view(1, -1, 1).expand(q.shape[:3]).contiguous()
            self.sum = q.new_ones(q.shape[:3])
        self.mix = q.new_zeros(*q.shape[:3], features)

    def take(
        self, live: int, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, terms: torch.Tensor | None
    ) -> None:
        """Add one tile, k[I, C, G, D] and v[I, C, G, E], for the groups from `live` on; terms are [I, H, R, C]."""
        scores = self.shape.capped(self._product(self.q[live:], self._per_head(k).mT))
        scores = scores if terms is None else scores + terms
        scores = scores.masked_fill(hidden, -torch.inf)
        top = torch.maximum(self.top[live:], scores.amax(-1))
        base = top.masked_fill(top == -torch.inf, 0.0)  # no key so far: -inf - -inf is NaN
        weights, kept = (scores - base.unsqueeze(-1)).exp(), (self.top[live:] - base).exp()
        self.sum[live:] = self.sum[live:] * kept + weights.sum(-1)
        self.mix[live:] = self.mix[live:] * kept.unsqueeze(-1) + self._product(weights, self._per_head(v))
        self.top[live:] = top

    def result(self) -> Pair:
        return self.mix / self.sum.unsqueeze(-1), self.top + self.sum.log()

    def _per_head(self, x: torch.Tensor) -> torch.Tensor:
        """[I, C, G, F] as [I * H, C, F]; the heads of a group are adjacent."""
        (n, C, G, F), H = x.shape, self.q.shape[1]
        return x.transpose(1, 2).unsqueeze(2).expand(n, G, H // G, C, F).reshape(n * H, C, F)

    @staticmethod
    def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a[I, H, R, ·] times b[I * H, ·, ·], head by head."""
        return torch.bmm(a.flatten(0, 1), b).unflatten(0, a.shape[:2])
