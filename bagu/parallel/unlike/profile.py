"""How long a step takes on a worker: a formula fitted to a few timed steps, and corrected while the worker runs.

    seconds = base + [any prompt] x b + prompt x p + attended x a + decodes x d + read x r    no coefficient below 0

A training step is all prompt. The coefficients minimise the relative error of the timed steps: few are measured, and
a step of 1 ms counts as much as one of 1 s. Prompts and decodes have their own fixed and per-position costs, since they
run through different code: with one of each the error on other shapes was 1.2 to 2.4 times as large (journal 025).
`StepCost.error` is the mean relative error on a step that the fit had not seen (each left out in turn). `Correction`
scales the formula to the speed that is measured at work: a worker that shares its cores with others, or was profiled
wrongly, has another one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

from bagu.errors import ArgumentError

MEMORY = 8.0  # measurements that a correction averages over: an error of 3x is within 10 % after 20 of them


class Step(NamedTuple):
    """What a step computes: tokens, and the positions that they attend to, summed over the tokens."""

    prompt: int = 0  # tokens of prompts, or of a training step
    decodes: int = 0  # tokens that continue a sequence
    attended: int = 0  # positions, by tokens of prompts
    read: int = 0  # positions, by decodes

    @classmethod
    def of_prompt(cls, tokens: int, cached: int = 0) -> Step:
        """`tokens` of a prompt after `cached` ones, which are not computed again."""
        return cls(tokens, 0, tokens * cached + tokens * (tokens + 1) // 2)

    @classmethod
    def of_decodes(cls, contexts: Sequence[int]) -> Step:
        return cls(0, len(contexts), 0, sum(contexts))


class Timed(NamedTuple):
    step: Step
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The formula. `error` is the mean relative error on steps it was not fitted to; None if that is not known."""

    base: float  # seconds of any step
    prompt: float  # seconds per token of a prompt
    any_prompt: float = 0.0  # seconds of a step with tokens of a prompt
    attended: float = 0.0  # seconds per position that those attend to
    decode: float = 0.0  # seconds per decode
    read: float = 0.0  # seconds per position that decodes attend to
    error: float | None = None

    def seconds(self, step: Step) -> float:
        fixed = self.base + (self.any_prompt if step.prompt else 0.0)
        prompt = step.prompt * self.prompt + step.attended * self.attended
        return fixed + prompt + step.decodes * self.decode + step.read * self.read

    def scaled(self, factor: float) -> StepCost:
        """The cost on a worker that takes `factor` times as long."""
        return replace(self, **{name: factor * getattr(self, name) for name in PARTS})


PARTS = ("base", "any_prompt", "prompt", "attended", "decode", "read")


def _row(step: Step) -> tuple[float, ...]:
    """What each of PARTS is multiplied by."""
    return (1.0, float(step.prompt > 0), step.prompt, step.attended, step.decodes, step.read)


def fit(timed: Sequence[Timed]) -> StepCost:
    """The cost of a worker from timed steps, three or more, of different shapes."""
    if len({t.step for t in timed}) < 3 or any(t.seconds <= 0 for t in timed):
        raise ArgumentError(
            f"a cost from {len(timed)} timed steps of {len({t.step for t in timed})} shapes",
            hint="time steps of three shapes or more; each takes longer than 0 s",
        )
    errors = []
    for step in {t.step for t in timed}:
        held, rest = [t for t in timed if t.step == step], [t for t in timed if t.step != step]
        left_out = _solve(rest)
        errors += [abs(left_out.seconds(t.step) / t.seconds - 1) for t in held]
    return replace(_solve(timed), error=sum(errors) / len(errors))


def _solve(timed: Sequence[Timed]) -> StepCost:
    """Least squares of the relative errors with coefficients of 0 or more: the best of the 63 sets of coefficients
    that are not 0, each solved without the bound."""
    import numpy as np  # here: the HTTP server's process evaluates costs and starts without numpy

    rows = np.array([_row(t.step) for t in timed]) / np.array([[t.seconds] for t in timed])
    scale = np.maximum(np.abs(rows).max(0), 1e-300)  # seconds per position are 1e-6 of those of a step
    rows, best, least = rows / scale, np.zeros(len(PARTS)), float("inf")
    for count in range(1, 1 + min(len(PARTS), len(timed))):
        for used in map(list, combinations(range(len(PARTS)), count)):
            found, *_ = np.linalg.lstsq(rows[:, used], np.ones(len(rows)), rcond=None)
            loss = float(((rows[:, used] @ found - 1) ** 2).sum())
            if (found >= 0).all() and loss < least - 1e-12:
                best, least = np.zeros(len(PARTS)), loss
                best[used] = found
    return StepCost(**dict(zip(PARTS, map(float, best / scale), strict=True)))


class Took(NamedTuple):
    """The seconds of a step, and of those the ones that the worker's core spent on it (equal if that is not known)."""

    seconds: float
    busy: float


def measure(run: Callable[[Step], Took], steps: Sequence[Step], *, budget_s: float, rounds: int = 8) -> StepCost:
    """Time `steps` in turn until the budget is spent: small ones first, three at least, each `rounds` times at most.

    The fastest time of a step counts, since others only make it slower, and rounds spread a burst of their work over
    all steps. The shape of the cost comes from the busy seconds, in which a process that shares the core has no part;
    its scale from the ratio of the seconds to them, of which the median step's is taken.
    """
    began, fastest = time.perf_counter(), dict[Step, Took]()
    for step in (step for _ in range(rounds) for step in steps):
        if len(fastest) >= 3 and time.perf_counter() - began > budget_s:
            break
        took, known = run(step), fastest.get(step)
        fastest[step] = took if known is None else Took(*map(min, took, known))
    shape = fit([Timed(step, took.busy) for step, took in fastest.items()])
    return shape.scaled(statistics.median(took.seconds / took.busy for took in fastest.values()))


class Correction:
    """Measured over predicted seconds of the last work, 1 before any. Older work counts less and less."""

    def __init__(self, memory: float = MEMORY) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._predicted = self._measured = 0.0

    @property
    def factor(self) -> float:
        return self._measured / self._predicted if self._predicted > 0 else 1.0

    def add(self, predicted: float, measured: float) -> None:
        """Account for one piece of work."""
        if predicted > 0 and measured >= 0:
            self._predicted = self._keep * self._predicted + predicted
            self._measured = self._keep * self._measured + measured
