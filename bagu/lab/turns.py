"""Several ways to do one thing, timed in turns: a busy moment of the machine does not hit one of them alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from bagu.machine.timing import measure

ROUNDS = 3


def best_times(ways: Mapping[str, Callable[[], object]], device: str, *, seconds: float) -> dict[str, float]:
    """Seconds of a call of each: the best of three medians, since what else the machine does can only slow it.

    Each round samples a way for `seconds`, at least once. The caches are not flushed: data stay in the one they fit.
    """
    best = dict.fromkeys(ways, inf)
    for _ in range(ROUNDS):
        for name, call in ways.items():
            timing = measure(call, device, warmup=1, min_samples=1, seconds=seconds, flush_l2=False)
            best[name] = min(best[name], timing.median_s)
    return best
