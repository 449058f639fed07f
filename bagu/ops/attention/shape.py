"""The terms of a score beyond the product of query and key: the cap, the mask, the terms by distance, the sink.

The distance of a query at i and a key at j is j - i. It determines the mask (-inf: later keys, keys outside the window;
other segments are masked too), ALiBi's penalty and the learned bias. A distance inside a segment is the same whether
positions count from the segment's begin or from the batch's, so one function serves a segment, many segments of one
length, and the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def index(n: int, like: torch.Tensor) -> torch.Tensor:
    """0, 1, …, n - 1 as int64. It does not use torch.arange: a DTensor cannot be combined with a plain tensor."""
    return like.new_ones(n, dtype=torch.int64).cumsum(0) - 1


def side_by_side(x: torch.Tensor) -> torch.Tensor:
    """x with contiguous features per head: fused kernels assume unit stride without a check."""
    return x if x.stride(-1) == 1 else x.contiguous()


def add_sinks(
    found: tuple[torch.Tensor, torch.Tensor], sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the sinks to the denominator of out and lse, which were computed without them."""
    if sinks is None:
        return found
    out, lse = found
    sinks = sinks.to(lse.dtype)
    return (out * (lse - sinks).sigmoid().unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, sinks)


def segment_of(cu_seqlens: torch.Tensor, T: int) -> torch.Tensor:
    """The segment of each of T tokens, computed on the device: the number of segments that end at or before it."""
    return (index(T, cu_seqlens).unsqueeze(1) >= cu_seqlens[1:].unsqueeze(0)).sum(1)


def uniform(T: int, cu_seqlens: torch.Tensor, max_len: int) -> bool:
    """Whether every segment has length max_len, judged by sizes only: S segments of at most max_len tokens sum to T."""
    return T > 0 and (cu_seqlens.shape[0] - 1) * max_len == T


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The mask, and the terms that change scores."""

    causal: bool
    window: int | None = None
    slopes: torch.Tensor | None = None  # [H]
    bias: torch.Tensor | None = None  # [H, 2R - 1]
    sinks: torch.Tensor | None = None  # [H]
    softcap: float | None = None

    @property
    def plain(self) -> bool:
        """Whether there is no term except `causal`, which every fused kernel supports."""
        return self.window is None and all(x is None for x in (self.slopes, self.bias, self.sinks, self.softcap))

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """softcap * tanh(scores / softcap), for scores that are already scaled."""
        return scores if self.softcap is None else (scores / self.softcap).tanh() * self.softcap

    def additive(self, L: int, like: torch.Tensor, segment: torch.Tensor | None = None) -> torch.Tensor | None:
        """The term to add to the scores of L queries and L keys, in `like`'s dtype; None if there is none.

        Its shape is [L, L], or [H, L, L] if heads differ. `segment` is the segment of each of the L tokens; if it is
        given, keys of other segments are masked too.
        """
        return self.between(_distances(L, like), like, segment)

    def between(
        self, distance: torch.Tensor, like: torch.Tensor, segment: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Like `additive`, for queries and keys at distance[I, J]."""
        hidden, total = self.hidden(distance, segment), self.terms(distance, like)
        if hidden is None:
            return total
        return (like.new_zeros(distance.shape) if total is None else total).masked_fill(hidden, -torch.inf)

    def terms(self, distance: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
        """ALiBi's penalty and the learned bias of distance[…, I, J], as [H, …, I, J]; None if there are none."""
        total = None
        if self.slopes is not None:
            total = -self.slopes.to(like.dtype).view(-1, *(1,) * distance.ndim) * distance.abs()
        if self.bias is not None:
            learned = self.bias.to(like.dtype)[:, self._column(distance)]
            total = learned if total is None else total + learned
        return total

    def bias_gradient(self, dscores: torch.Tensor) -> torch.Tensor:
        """The gradient of `bias` from that of the scores [B, H, L, L]: one sum for each distance."""
        assert self.bias is not None
        column = self._column(_distances(dscores.shape[-1], dscores)).flatten()
        summed = dscores.sum(0).flatten(1)
        return summed.new_zeros(self.bias.shape).index_add(1, column, summed)

    def hidden(self, distance: torch.Tensor, segment: torch.Tensor | None = None) -> torch.Tensor | None:
        """The mask of hidden keys, by distance; None if no key is hidden."""
        found = [distance > 0] if self.causal else []
        if self.window is not None:
            found.append(distance.abs() >= self.window)
        if segment is not None:
            found.append(segment.unsqueeze(0) != segment.unsqueeze(1))
        total = None
        for hidden in found:
            total = hidden if total is None else total | hidden
        return total

    def _column(self, distance: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        reach = self.bias.shape[1] // 2
        return distance.clamp(-reach, reach) + reach


def _distances(L: int, like: torch.Tensor) -> torch.Tensor:
    place = index(L, like)
    return place.unsqueeze(0) - place.unsqueeze(1)
