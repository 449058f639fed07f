"""The bytes that collectives send, by their formula, and a counter of them.

    all_reduce       2 (N - 1) / N * S      reduce-scatter, then all-gather, as a ring (ring.py)
    reduce_scatter     (N - 1) / N * S      S is the whole tensor, of which each rank keeps one part
    all_gather         (N - 1) / N * S      S is the whole tensor, of which each rank brings one part
    all_to_all         (N - 1) / N * S      S is what one rank sends to all, itself included
    send                            S

These are the bytes that one rank sends by the bandwidth-optimal algorithm, from the sizes of the tensors that were
given; an all-to-all of rows counts those that go to other ranks. A library may send more: `gloo_bytes` is what Gloo
sends, which reduce-scatters by an all-reduce of a copy, and sockets.py reads what the kernel has sent. Every collective
of training goes through collectives.py, so that a mesh's `Traffic` has all of them, by kind and group.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"]


def sent_bytes(kind: Kind, size: int, ranks: int) -> int:
    """The bytes that one of `ranks` ranks sends for a collective of `size` bytes; see the table above."""
    if kind == "send":
        return size
    return size * (ranks - 1) * (2 if kind == "all_reduce" else 1) // ranks


@dataclass(frozen=True, kw_only=True)
class Tally:
    """The collectives of one kind over one group: how many, the sizes of their tensors, and the bytes sent."""

    calls: int = 0
    size: int = 0
    sent: int = 0


def gloo_bytes(tallies: Mapping[tuple[Kind, str], Tally]) -> int:
    """The bytes that Gloo sends for these collectives."""
    return sum(t.sent * (2 if kind == "reduce_scatter" else 1) for (kind, _), t in tallies.items())


class Traffic:
    """Counts the collectives of one rank, by (kind, group). `step` is the step that they are of."""

    def __init__(self) -> None:
        self.tallies: dict[tuple[Kind, str], Tally] = {}
        self.calls = 0  # of all kinds
        self.step = 0
        self.waited_s = 0.0  # that the host was blocked by collectives: communication that compute did not hide

    def add(self, kind: Kind, group: str, size: int, ranks: int, sent: int | None = None) -> None:
        """Count one collective; `sent` are its bytes if they are known, by default those of the formula."""
        self.calls += 1
        t = self.tallies.get((kind, group), Tally())
        sent = sent_bytes(kind, size, ranks) if sent is None else sent
        self.tallies[kind, group] = Tally(calls=t.calls + 1, size=t.size + size, sent=t.sent + sent)

    @property
    def sent(self) -> int:
        """All bytes that this rank sent."""
        return sum(t.sent for t in self.tallies.values())

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, nothing is added to the tallies: an evaluation is no part of a step."""
        before = dict(self.tallies)
        try:
            yield
        finally:
            self.tallies = before

    def since(self, before: Mapping[tuple[Kind, str], Tally]) -> dict[tuple[Kind, str], Tally]:
        """What was counted after a copy of `tallies` was taken."""
        grown = {}
        for key, t in self.tallies.items():
            b = before.get(key, Tally())
            if t.calls > b.calls:
                grown[key] = Tally(calls=t.calls - b.calls, size=t.size - b.size, sent=t.sent - b.sent)
        return grown
