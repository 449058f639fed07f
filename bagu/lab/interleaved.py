"""Interleaved timing: several implementations are timed in turn, so that other load on the machine affects all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from bagu.machine.timing import measure


def best_times(
    ways: Mapping[str, Callable[[], object]], device: str, *, seconds: float, rounds: int = 3
) -> dict[str, float]:
    """Seconds per call of each: the best of the rounds' medians, because other load can only make a call slower.

    Each round samples an implementation for `seconds`, at least once. Caches are not flushed: data that fit stay there.
    """
    best = dict.fromkeys(ways, inf)
    for _ in range(rounds):
        for name, call in ways.items():
            timing = measure(call, device, warmup=1, min_samples=1, seconds=seconds, flush_l2=False)
            best[name] = min(best[name], timing.median_s)
    return best
