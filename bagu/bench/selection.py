"""Choose the fastest of several candidates by interleaved measurements, with early stopping and a verdict.

All candidates are measured in turn, so that a drift of clocks or load hits each of them. After `MIN_ROUNDS` rounds, a
candidate whose paired ratio to the fastest is above 1 with 99 % confidence is dropped. The winner must beat the default
by `MIN_GAIN` with the same confidence, otherwise the verdict is that nothing is faster than the default.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Selection", "select"]

MIN_ROUNDS = 5
MAX_ROUNDS = 40
MIN_GAIN = 1.01  # a smaller gain is not worth another compiled kernel
# two-sided 99 % quantiles of Student's t by degrees of freedom; 2.7 is close enough beyond
STUDENT = {4: 4.60, 5: 4.03, 6: 3.71, 7: 3.50, 8: 3.36, 9: 3.25, 10: 3.17, 12: 3.05, 15: 2.95, 20: 2.85, 30: 2.75}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Selection(Generic[T]):
    """The winner, None if nothing is significantly faster than the default, and all samples in seconds."""

    winner: T | None
    speedup: float
    samples: Mapping[T, Sequence[float]]
    rounds: int


def select(
    default: T, others: Sequence[T], measure: Callable[[T], float], *, deadline: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Selection[T]:  # fmt: skip
    """Measure until one candidate remains, `MAX_ROUNDS` rounds have run, or the deadline passes."""
    samples: dict[T, list[float]] = {c: [] for c in (default, *others)}
    running, rounds = list(samples), 0
    while rounds < MAX_ROUNDS and (rounds < MIN_ROUNDS or (len(running) > 1 and clock() < deadline)):
        for candidate in running:
            samples[candidate].append(measure(candidate))
        rounds += 1
        if rounds >= MIN_ROUNDS:
            best = min(running, key=lambda c: statistics.median(samples[c]))
            running = [c for c in running if c == best or not _slower(samples[c], samples[best])]
    best = min(samples, key=lambda c: statistics.median(samples[c][-rounds:]) if c in running else math.inf)
    paired = len(samples[default])
    gain = statistics.median(samples[default]) / statistics.median(samples[best][:paired])
    if best == default or gain < MIN_GAIN or not _slower(samples[default], samples[best]):
        return Selection(winner=None, speedup=1.0, samples=samples, rounds=rounds)
    return Selection(winner=best, speedup=gain, samples=samples, rounds=rounds)


def _slower(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether a is slower than b with 99 % confidence: by a t-interval of the logarithms of the paired ratios."""
    ratios = [math.log(x / y) for x, y in zip(a, b, strict=False)]
    if len(ratios) < MIN_ROUNDS:
        return False
    freedom = len(ratios) - 1
    quantile = STUDENT[max(k for k in STUDENT if k <= freedom)] if freedom <= 30 else 2.7
    return statistics.fmean(ratios) - quantile * statistics.stdev(ratios) / math.sqrt(len(ratios)) > 0
