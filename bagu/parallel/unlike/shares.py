"""How many micro-batches of a step each worker computes, by the time that it takes for one.

A step's micro-batches are the same whatever the shares are, and their loss is divided by the counts of the whole step:
shares change who computes a micro-batch, not the result (up to the order of the sums). Every worker sees the times of
all of them and decides by the same numbers, so that no message says what the shares are.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from bagu.errors import ArgumentError

WARM_UP = 1  # the first step allocates memory, and may compile
TIMED = 3  # steps whose median is a worker's time
GAIN = 1.08  # a change must promise this much: times of equal workers differ by a few percent


def divide(number: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """The micro-batches of each worker by its seconds for one, so that the slowest is done as early as possible.

    Each has at least one: a worker without any has nothing to measure, and could not come back.
    """
    if number < len(seconds):
        raise ArgumentError(
            f"a step has {number} micro-batches, and {len(seconds)} workers share them",
            hint=f"set data.micro_batches to {len(seconds)} or more; 4 for each worker let shares follow their speed",
        )
    counts = [1] * len(seconds)
    ends = [(2 * each, worker) for worker, each in enumerate(seconds)]  # were it to get one more
    heapq.heapify(ends)
    for _ in range(number - len(seconds)):
        _, worker = ends[0]
        counts[worker] += 1
        heapq.heapreplace(ends, ((counts[worker] + 1) * seconds[worker], worker))
    return tuple(counts)


def dealt(counts: Sequence[int], worker: int) -> list[int]:
    """The numbers of the micro-batches of a worker: dealt in turn to those that have room. With equal counts it is
    every n-th one, as without shares."""
    before = [sum(min(count, turn) for count in counts) for turn in range(counts[worker])]
    return [first + sum(count > turn for count in counts[:worker]) for turn, first in enumerate(before)]


def slowest(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """The seconds that a step computes: those of the worker that is done last."""
    return max(count * each for count, each in zip(counts, seconds, strict=True))


@dataclass(frozen=True, kw_only=True)
class Change:
    """New shares: the micro-batches of each worker before and now, its seconds for one, and what a step is to gain."""

    before: tuple[int, ...]
    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def compute_s(self) -> float:
        return slowest(self.counts, self.seconds)

    @property
    def gain(self) -> float:
        """The computing time of a step before, over that now."""
        return slowest(self.before, self.seconds) / self.compute_s

    def facts(self) -> dict[str, str | float]:
        """For an event of the run."""
        relative = ":".join(f"{min(self.seconds) / each:.2f}" for each in self.seconds)
        texts = [":".join(map(str, counts)) for counts in (self.before, self.counts)]
        return {"before": texts[0], "now": texts[1], "speeds": relative, "predicted_gain": round(self.gain, 3)}


class Shares:
    """The shares of a run, from its times so far. `counts` are those of the next step; `record` is called after each.

    They begin equal, change after the first timed steps, and again when a worker has become slower or faster and other
    shares promise a gain of GAIN.
    """

    def __init__(self, workers: int) -> None:
        self._in_use = (1.0,) * workers  # seconds for a micro-batch that the counts come from
        self._times: tuple[float, ...] | None = None  # the last ones that were measured
        self._skip = WARM_UP
        self._recent: deque[tuple[float, ...]] = deque(maxlen=TIMED)  # seconds for one micro-batch, of each worker
        self._rest: deque[float] = deque(maxlen=TIMED)  # seconds of a step that no worker computes
        self._last: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())  # counts and seconds of the last step
        self._predicts: tuple[float, ...] | None = None
        self.change: Change | None = None  # by the last step

    @property
    def computed(self) -> tuple[float, ...]:
        """The seconds that each worker computed in the last step."""
        return self._last[1]

    def counts(self, number: int) -> tuple[int, ...]:
        """The micro-batches of each worker in a step of `number`."""
        return divide(number, self._in_use)

    def record(self, counts: Sequence[int], seconds: Sequence[float]) -> None:
        """The last step: what each worker computed, and how long."""
        self.change, self._last = None, (tuple(counts), tuple(seconds))
        if self._skip:
            self._skip -= 1
            return
        self._recent.append(tuple(each / count for each, count in zip(seconds, counts, strict=True)))
        if len(self._recent) < TIMED:
            return
        now = self._times = tuple(statistics.median(column) for column in zip(*self._recent, strict=True))
        change = Change(before=tuple(counts), counts=divide(sum(counts), now), seconds=now)
        if change.gain >= GAIN:
            self._in_use, self.change = now, change
            self._recent.clear()

    def row(self, step_s: float) -> dict[str, float | int | None]:
        """The metrics of a step that took `step_s`: what workers waited for the slowest of them, and beside `step_s`
        the time that the steps before it predict."""
        counts, seconds = self._last
        most = max(seconds)
        idle = 100 * (1 - sum(seconds) / (len(seconds) * most))
        row: dict[str, float | int | None] = {"shares_idle_percent": idle, "step_s": step_s}
        if self._predicts is not None:
            row["predicted_step_s"] = slowest(counts, self._predicts) + statistics.median(self._rest)
        self._predicts = self._times  # a step is predicted by those before it
        self._rest.append(max(0.0, step_s - most))
        return row
