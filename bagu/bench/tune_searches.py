"""What a store says about each search: its points, gain and regret."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bagu.ops.tuning.store import Kind, Measurement, Record, Winner, winners

Key = tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, kw_only=True)
class Point:
    """All measurements of one set of options; () are the defaults."""

    options: Key
    status: str  # of the last
    median_s: float  # of the medians; 0 unless it was timed
    samples: int
    seconds: float
    timed: bool


@dataclass(frozen=True, kw_only=True)
class Search:
    """One step of an op at one size."""

    winner: Winner
    points: Sequence[Point]

    @property
    def timed(self) -> list[Point]:
        return [p for p in self.points if p.timed]

    @property
    def whole(self) -> bool:
        """Whether every set of options that can run was measured."""
        others = [p for p in self.points if p.options]
        left_out = any(p.status == "roofline" for p in others)
        return bool(self.timed) and len(others) == self.winner.space and not left_out

    @property
    def regret(self) -> float | None:
        """How much slower the chosen options are than the best ones, 0.02 for 2 %; None if not all were measured."""
        right = [p for p in self.timed if p.status != "wrong"]
        own = [p.median_s for p in right if p.options == tuple(self.winner.options.items())]
        return own[0] / min(p.median_s for p in right) - 1 if self.whole and own else None

    @property
    def gap(self) -> float | None:
        """The time of the defaults over that of the fastest options that were measured."""
        default = [p.median_s for p in self.timed if not p.options]
        return default[0] / min(p.median_s for p in self.timed if p.status != "wrong") if default else None


def searches(records: Iterable[Record]) -> list[Search]:
    """The searches of a store, by the order of their results."""
    kept = list(records)
    found: dict[Kind, dict[Key, list[Measurement]]] = {}
    for m in (r for r in kept if isinstance(r, Measurement)):
        found.setdefault(m.kind, {}).setdefault(tuple(m.options.items()), []).append(m)
    return [
        Search(winner=winner, points=[_point(key, own) for key, own in found.get(kind, {}).items()])
        for kind, winner in winners(kept).items()
    ]


def _point(key: Key, own: Sequence[Measurement]) -> Point:
    times = [m.median_s for m in own if m.median_s is not None]
    return Point(
        options=key,
        status=own[-1].status,
        median_s=statistics.median(times) if times else 0.0,
        samples=sum(m.samples for m in own),
        seconds=sum(m.seconds for m in own),
        timed=bool(times),
    )
