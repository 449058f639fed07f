"""Mixing: which source each row of each step comes from.

Source i has the share p_i(s) of step s, where p_i ∝ w_i^(1/τ); the weights w are given, or are the sources' token
counts, and may move over the steps. Its ideal is I_i(s) = R Σ p_i over the steps before s, for R rows per step. Rows
are given out so that after every step each source's count is I_i rounded down or up: never a whole row off, however
small its share and however long the run. That is Tijdeman's chairman assignment (1980): a source's next row has a
deadline, the moment its ideal reaches it, and the earliest deadlines are served first.

Counts are a function of the step alone. They are worked out from step 0 on and kept every `STRIDE` steps: step
1,000,000 of three sources takes 4 s the first time (one core), any step a millisecond from then on.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from bagu.errors import ArgumentError, UnknownName

__all__ = ["MixConfig", "MixPoint", "Mixture"]

STRIDE = 256  # steps between kept counts
GRAIN = 2**30  # shares are multiples of 1/GRAIN, so that the last bit of a platform's pow() does not choose the data
SLACK = 1e-6  # rows: an ideal this near to a whole number is that number


@dataclass(frozen=True, kw_only=True)
class MixPoint:
    """The weights at a step; between two points the shares change linearly."""

    step: int
    weights: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class MixConfig:
    """How sources are mixed. Without weights or schedule, in proportion to their tokens."""

    weights: dict[str, float] | None = None
    temperature: float = 1.0  # above 1 evens the shares out, below 1 sharpens them
    schedule: tuple[MixPoint, ...] = field(default=())  # before the first and after the last point the shares stay

    def __post_init__(self) -> None:
        if self.weights is not None and self.schedule:
            raise ArgumentError("a mixture has weights or a schedule of weights, not both", hint="remove one of them")
        if not 0 < self.temperature < math.inf:
            raise ArgumentError(f"the temperature of a mixture is {self.temperature}", hint="give a number above 0")
        steps = [point.step for point in self.schedule]
        if steps != sorted(set(steps)) or any(step < 0 for step in steps):
            raise ArgumentError(f"a mixture's schedule has the steps {steps}", hint="make them ascend from 0 or more")


class Mixture:
    """The assignment of rows to sources. All methods may be called from any thread, in any order of steps."""

    def __init__(self, config: MixConfig, tokens: Mapping[str, int], *, rows_per_step: int) -> None:
        """`tokens` names the sources and how many tokens each has."""
        self.names = tuple(tokens)
        self.rows_per_step = rows_per_step
        points = config.schedule or (MixPoint(step=0, weights=config.weights or dict(tokens)),)
        self._steps = np.array([point.step for point in points], np.int64)
        self._shares = np.stack([_shares(point.weights, self.names, config.temperature) for point in points])
        self._kept = [(0,) * len(self.names)]  # counts at step 0, STRIDE, 2 STRIDE, ...
        self._block: tuple[int, list[tuple[int, ...]]] | None = None  # the last block worked out, and its counts
        self._lock = threading.Lock()

    def shares(self, step: int) -> dict[str, float]:
        """What part of step `step` each source should have."""
        return dict(zip(self.names, self._shares_at(np.array([step]))[0].tolist(), strict=True))

    def counts(self, step: int) -> tuple[int, ...]:
        """Rows of each source in the steps before `step`."""
        if len(self.names) == 1:
            return (step * self.rows_per_step,)
        with self._lock:
            block = step // STRIDE
            while len(self._kept) <= block:
                self._kept.append(self._walk(len(self._kept) - 1)[-1])
            if self._block is None or self._block[0] != block:
                self._block = (block, self._walk(block))
            return self._block[1][step % STRIDE]

    def rows(self, step: int) -> list[tuple[int, int]]:
        """For each row of `step`: its source, and how many rows that one gave before. Sources are spread evenly."""
        before, after = self.counts(step), self.counts(step + 1)
        spread = []
        for source, (first, last) in enumerate(zip(before, after, strict=True)):
            spread += [((n - first + 0.5) / (last - first), source, n) for n in range(first, last)]
        return [(source, n) for _, source, n in sorted(spread)]

    def ideal(self, steps: np.ndarray) -> np.ndarray:
        """I(s), [len(steps), sources] float64: the rows each source should have had before each step."""
        total = np.zeros((len(steps), len(self.names)))
        knots = [0, *self._steps.tolist()]
        shares = np.concatenate((self._shares[:1], self._shares))
        for i, start in enumerate(knots):
            last = i + 1 == len(knots)
            length = None if last else knots[i + 1] - start
            n = np.clip(steps - start, 0, length).astype(np.float64)[:, None]  # steps of this stretch that lie before s
            slope = np.zeros(len(self.names)) if last or not length else (shares[i + 1] - shares[i]) / length
            total += n * shares[i] + n * (n - 1) / 2 * slope
        return total * self.rows_per_step

    def _shares_at(self, steps: np.ndarray) -> np.ndarray:
        return np.stack([np.interp(steps, self._steps, column) for column in self._shares.T], axis=1)

    def _walk(self, block: int) -> list[tuple[int, ...]]:
        """Counts at each step of a block, and at the first step after it."""
        steps = np.arange(block * STRIDE, (block + 1) * STRIDE + 1)
        due = np.floor(self.ideal(steps) + SLACK)
        ahead = np.maximum(self.ideal(steps) - due, 0)  # how far each ideal is into its next row
        with np.errstate(divide="ignore", invalid="ignore"):
            wait = np.where(ahead > SLACK, (1 - ahead) / self._shares_at(steps), np.inf)  # until that row is due
        plan = zip(steps.tolist(), due.astype(np.int64).tolist(), wait.tolist(), strict=True)
        counts = [self._kept[block]]
        for step, step_due, step_wait in list(plan)[1:]:
            counts.append(self._deal(step, step_due, step_wait, counts[-1]))
        return counts

    def _deal(self, step: int, due: list[int], wait: list[float], before: tuple[int, ...]) -> tuple[int, ...]:
        """Counts at `step` from those one step earlier: what is due, then one row more to those due next."""
        counts = list(map(max, before, due))
        left = step * self.rows_per_step - sum(counts)
        if left:
            # a source that has its next row already waits longest; there are fewer rows left than sources
            order = sorted(
                (have > floor, time, i) for i, (have, floor, time) in enumerate(zip(counts, due, wait, strict=True))
            )
            for _, _, i in order[:left]:
                counts[i] += 1
        return tuple(counts)


def _shares(weights: Mapping[str, float], names: tuple[str, ...], temperature: float) -> np.ndarray:
    """p ∝ w^(1/τ) in the order of `names`, as multiples of 1/GRAIN that sum to 1."""
    for name in weights:
        if name not in names:
            raise UnknownName.among("source in this mixture", name, names)
    missing = [name for name in names if name not in weights]
    if missing:
        raise ArgumentError(f"the mixture has no weight for {', '.join(missing)}", hint="give 0 to leave a source out")
    given = np.array([weights[name] for name in names], np.float64)
    if not (np.isfinite(given).all() and (given >= 0).all() and given.sum() > 0):
        raise ArgumentError(
            f"the weights of a mixture are {dict(weights)}", hint="give numbers of 0 or more, not all of them 0"
        )
    powers = (given / given.max()) ** (1 / temperature)
    grains = np.rint(powers / powers.sum() * GRAIN)
    grains[given > 0] = np.maximum(grains[given > 0], 1)
    grains[np.argmax(grains)] += GRAIN - grains.sum()
    return grains / GRAIN
