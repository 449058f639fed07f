"""Trained models against a baseline of the same seed: the difference in percent, with its interval over the seeds."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bagu.lab.core import Verdict
from bagu.lab.parts.confidence import interval
from bagu.lab.plot import Line
from bagu.lab.rows import Row, names_in, number, numbers_in, where


class Percent(NamedTuple):
    """A mean over seeds and the half width of its 95 % interval."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def beside(self, margin: float) -> bool:
        """Whether the interval is on one side of the margin, so that the seeds decide."""
        return self.high <= margin or self.low > margin

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ± {self.half:.1f} %"


def against(rows: Sequence[Row], base: str, *, by: str = "kind", value: str = "val_loss_nats") -> dict[str, Percent]:
    """For each name in column `by`: how many percent its `value` is above that of `base`, seed by seed."""
    found = {}
    for name in names_in(rows, by):
        ratios = [
            100 * (number(where(rows, **{by: name}, seed=seed)[0], value) / number(own[0], value) - 1)
            for seed in numbers_in(rows, "seed")
            if (own := where(rows, **{by: base}, seed=seed))
        ]
        found[name] = Percent(*interval(ratios)) if name != base else Percent(0.0, 0.0)
    return found


def dots(found: dict[str, Percent]) -> Line:
    """The differences as points with intervals, one at each place 0, 1, …"""
    ends = [(p.low, p.high) for p in found.values()]
    return Line(list(range(len(found))), [p.mean for p in found.values()], "", "o", 0, ends)


def settled(said: Verdict, parts: Iterable[tuple[Percent, float]]) -> Verdict:
    """The verdict, or an open one if the interval of a difference is on both sides of its margin."""
    unclear = sorted({margin for found, margin in parts if not found.beside(margin)})
    if not unclear:
        return said
    margins = ", ".join(f"{margin:g}" for margin in unclear)
    return said.undecided(
        f"more seeds or steps, until each interval is on one side of its margin ({margins} %).",
        f"更多种子或步数，直到各区间都落在界限（{margins} %）的一侧。",
    )
