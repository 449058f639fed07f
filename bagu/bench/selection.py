"""Choose the fastest of several candidates by interleaved measurements, with early stopping and a verdict.

All candidates are measured in turn, so that a drift of clocks or load hits each of them. After `MIN_ROUNDS` rounds a
candidate is dropped if, with 99 % confidence, it is slower than the fastest, or not faster than the default by
`MIN_GAIN`. A winner must beat the default by `MIN_GAIN`, and be faster with the same confidence; otherwise the verdict
is that there is no significant winner.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

MIN_ROUNDS = 5
MAX_ROUNDS = 40
MIN_GAIN = 1.01  # a smaller gain is not worth another compiled kernel
# two-sided 99 % quantiles of Student's t by degrees of freedom; 2.7 is close enough beyond
STUDENT = {4: 4.60, 5: 4.03, 6: 3.71, 7: 3.50, 8: 3.36, 9: 3.25, 10: 3.17, 12: 3.05, 15: 2.95, 20: 2.85, 30: 2.75}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Selection(Generic[T]):
    """The result of a selection: `faster` has what beats the default and by how much, the winner first."""

    faster: Mapping[T, float]
    samples: Mapping[T, Sequence[float]]  # seconds; those of a candidate that failed end with infinity
    rounds: int

    @property
    def winner(self) -> T | None:
        """None if nothing is significantly faster than the default."""
        return next(iter(self.faster), None)

    @property
    def speedup(self) -> float:
        return next(iter(self.faster.values()), 1.0)


def select(
    default: T,
    others: Sequence[T],
    measure: Callable[[T], float],
    *,
    deadline: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Selection[T]:
    """Measure until one candidate remains, `MAX_ROUNDS` rounds have run, or the deadline passes.

    A candidate that cannot be measured returns infinity and is not measured again.
    """
    samples: dict[T, list[float]] = {c: [] for c in (default, *others)}
    running, rounds = list(samples), 0
    while rounds < MAX_ROUNDS and (rounds < MIN_ROUNDS or (len(running) > 1 and clock() < deadline)):
        for candidate in running:
            samples[candidate].append(measure(candidate))
        rounds += 1
        running = [c for c in running if samples[c][-1] < math.inf]
        if not running:
            break
        if rounds >= MIN_ROUNDS:
            best = min(running, key=lambda c: statistics.median(samples[c]))
            running = [c for c in running if c == best or not _lost(samples, c, best, default)]
    return Selection(faster=_faster(default, samples, running), samples=samples, rounds=rounds)


def _lost(samples: Mapping[T, Sequence[float]], one: T, best: T, default: T) -> bool:
    """Whether a candidate is slower than the best, or is not the default and cannot beat it by MIN_GAIN."""
    hopeless = one != default and _slower(samples[one], samples[default], by=1 / MIN_GAIN)
    return hopeless or _slower(samples[one], samples[best])


def _faster(default: T, samples: Mapping[T, Sequence[float]], running: Sequence[T]) -> dict[T, float]:
    """The candidates that beat the default: those still running at the end, then the others, each by their times."""
    found = {}
    order = sorted(samples, key=lambda c: (c not in running, statistics.median(samples[c]) if samples[c] else math.inf))
    for one in order:
        own, base = _paired(samples[one], samples[default])
        if one == default or not own or math.inf in own or math.inf in base:
            continue
        gain = statistics.median(base) / statistics.median(own)
        if gain >= MIN_GAIN and _slower(base, own):
            found[one] = gain
    return found


def _paired(a: Sequence[float], b: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    count = min(len(a), len(b))
    return a[:count], b[:count]


def _slower(a: Sequence[float], b: Sequence[float], by: float = 1.0) -> bool:
    """Whether a > by * b with 99 % confidence: by a t-interval of the logarithms of the paired ratios."""
    ratios = [math.log(x / (by * y)) for x, y in zip(a, b, strict=False) if x < math.inf and y < math.inf]
    if len(ratios) < MIN_ROUNDS:
        return False
    freedom = len(ratios) - 1
    quantile = STUDENT[max(k for k in STUDENT if k <= freedom)] if freedom <= 30 else 2.7
    return statistics.fmean(ratios) - quantile * statistics.stdev(ratios) / math.sqrt(len(ratios)) > 0
