"""Interleaved timing: several implementations are timed in turn, so that other load on the machine affects all."""

from collections.abc import Callable, Mapping

from bagu.machine.timing import measure


def round_times(
    ways: Mapping[str, Callable[[], object]], device: str, *, seconds: float, rounds: int = 3
) -> dict[str, list[float]]:
    """Seconds per call of each: its median in every round.

    Each round samples an implementation for `seconds`, at least once. Caches are not flushed: data that fit stay there.
    """
    medians: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            timing = measure(call, device, warmup=1, min_samples=1, seconds=seconds, flush_l2=False)
            medians[name].append(timing.median_s)
    return medians


def best_times(
    ways: Mapping[str, Callable[[], object]], device: str, *, seconds: float, rounds: int = 3
) -> dict[str, float]:
    """The best of the rounds' medians, because other load can only make a call slower."""
    return {name: min(times) for name, times in round_times(ways, device, seconds=seconds, rounds=rounds).items()}
