"""How long a step takes on a worker: a formula fitted to a few timed steps, and corrected while the worker runs.

    seconds = base + prompt x p + decodes x d + attended x a          all coefficients 0 or more

A training step is all prompt. The coefficients minimise the relative error of the timed steps: few are measured, and
a step of 1 ms counts as much as one of 1 s. `StepCost.error` is the mean relative error on a step that the fit had
not seen (each left out in turn). `Correction` scales the formula to the speed that is measured at work: a worker that
shares its cores with others, or was profiled wrongly, has another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

from bagu.errors import ArgumentError

MEMORY = 8.0  # measurements that a correction averages over: an error of 3x is within 10 % after 20 of them


class Step(NamedTuple):
    """What a step computes. `attended`: the positions that its tokens attend to, summed over the tokens."""

    prompt: int = 0  # tokens of prompts, or of a training step
    decodes: int = 0  # tokens that continue a sequence
    attended: int = 0

    @classmethod
    def of_prompt(cls, tokens: int, cached: int = 0) -> Step:
        """`tokens` of a prompt after `cached` ones, which are not computed again."""
        return cls(tokens, 0, tokens * cached + tokens * (tokens + 1) // 2)

    @classmethod
    def of_decodes(cls, contexts: Sequence[int]) -> Step:
        return cls(0, len(contexts), sum(contexts))


class Timed(NamedTuple):
    step: Step
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The formula. `error` is the mean relative error on steps it was not fitted to; None if that is not known."""

    base: float  # seconds of any step
    prompt: float  # seconds per token
    decode: float = 0.0
    attended: float = 0.0  # seconds per position
    error: float | None = None

    def seconds(self, step: Step) -> float:
        return self.base + step.prompt * self.prompt + step.decodes * self.decode + step.attended * self.attended

    def scaled(self, factor: float) -> StepCost:
        """The cost on a worker that takes `factor` times as long."""
        parts = {name: factor * getattr(self, name) for name in ("base", "prompt", "decode", "attended")}
        return replace(self, **parts)


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
    """Least squares of the relative errors with coefficients of 0 or more: the best of the 15 sets of coefficients
    that are not 0, each solved without the bound."""
    import numpy as np  # here: the HTTP server's process evaluates costs and starts without numpy

    rows = np.array([(1.0, *t.step) for t in timed]) / np.array([[t.seconds] for t in timed])
    scale = np.maximum(np.abs(rows).max(0), 1e-300)  # seconds per position are 1e-6 of those of a step
    best, least = np.zeros(4), float("inf")
    for count in range(1, 5):
        for used in map(list, combinations(range(4), count)):
            found, *_ = np.linalg.lstsq(rows[:, used] / scale[used], np.ones(len(rows)), rcond=None)
            loss = float(((rows[:, used] / scale[used] @ found - 1) ** 2).sum())
            if (found >= 0).all() and loss < least - 1e-12:
                best, least = np.zeros(4), loss
                best[used] = found / scale[used]
    base, prompt, decode, attended = map(float, best)
    return StepCost(base=base, prompt=prompt, decode=decode, attended=attended)


def measure(run: Callable[[Step], float], steps: Sequence[Step], *, budget_s: float) -> StepCost:
    """Time `steps` in their order, small ones first, until the budget is spent; three at least. `run` returns the
    seconds that a step took."""
    timed: list[Timed] = []
    for step in steps:
        timed.append(Timed(step, run(step)))
        if len(timed) >= 3 and sum(t.seconds for t in timed) > budget_s:
            break
    return fit(timed)


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
