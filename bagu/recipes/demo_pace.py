"""Train a stage of a demo in parts: after each part, its number of steps is fitted to the time that is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from bagu.recipes.demo_plan import Steps

RunT_co = TypeVar("RunT_co", covariant=True)


class Train(Protocol[RunT_co]):
    """Train a run of `steps` up to `pause_after` of them (None: all), with `resume` from where it paused."""

    def __call__(self, steps: int, *, resume: bool, pause_after: int | None) -> RunT_co: ...


def in_parts(
    steps: int, shares: Sequence[float], train: Train[RunT_co], revise: Callable[[int, RunT_co], int]
) -> tuple[int, RunT_co]:
    """Pause after these shares of the steps and let `revise` choose their number from what was done. Returns the last
    number and the finished run."""
    done = 0
    for share in shares:
        pause = max(done + 1, int(share * steps))
        if pause >= steps:
            break
        paused = train(steps, resume=done > 0, pause_after=pause)
        done, steps = pause, revise(pause, paused)
    return steps, train(steps, resume=done > 0, pause_after=None)


def seconds_of(rows: Sequence[Mapping[str, Any]]) -> float:
    """The time of the steps in these rows of metrics."""
    return sum(r["tokens"] / r["tokens_per_s"] for r in rows if r["tokens_per_s"])


def steps_made(rows: Sequence[Mapping[str, Any]]) -> Steps:
    """The steps in these rows and the mean time of one, which counts slow spells; the first step is warm-up."""
    timed = rows[1:] or rows
    return Steps(done=len(rows), step_s=seconds_of(timed) / len(timed))


def tokens_per_s(rows: Sequence[Mapping[str, Any]]) -> float:
    timed = rows[1:] or rows
    return float(sum(r["tokens"] for r in timed) / seconds_of(timed))
