"""Mixing: the source of each row of each step.

Source i has the fraction p_i(s) of step s, where p_i ∝ w_i^(1/τ). The weights w are given, or are the token counts of
the sources; they may change over the steps. The ideal count of source i is I_i(s) = R Σ p_i over the steps before s,
for R rows per step. Rows are assigned so that after every step the count of each source is I_i rounded down or up: the
error is below one row, for any fraction and any number of steps. This is Tijdeman's chairman assignment (1980): the
next row of a source has a deadline, the time when its ideal count reaches it, and the earliest deadlines go first.

Counts are a function of the step only. They are computed from step 0 on and stored every `STRIDE` steps: step 1,000,000
of three sources takes 4 s the first time (one core), and any step a millisecond after that.
"""

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from bagu.errors import ArgumentError, UnknownName

STRIDE = 256  # steps between stored counts
GRAIN = 2**30  # fractions are multiples of 1/GRAIN, so that rounding in a platform's pow() cannot change the data
SLACK = 1e-6  # rows: an ideal count this close to an integer is that integer


@dataclass(frozen=True, kw_only=True)
class MixPoint:
    """The weights at a step; between two points the fractions change linearly."""

    step: int
    weights: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class MixConfig:
    """How to mix sources. Without weights or schedule, in proportion to their tokens."""

    weights: dict[str, float] | None = None
    temperature: float = 1.0  # above 1 makes the fractions more equal, below 1 less
    schedule: tuple[MixPoint, ...] = field(default=())  # constant before the first and after the last point

    def __post_init__(self) -> None:
        if self.weights is not None and self.schedule:
            raise ArgumentError("a mixture has both weights and a schedule", hint="remove one of them")
        if not 0 < self.temperature < math.inf:
            raise ArgumentError(f"the mixture's temperature is {self.temperature}", hint="give a number above 0")
        steps = [point.step for point in self.schedule]
        if steps != sorted(set(steps)) or any(step < 0 for step in steps):
            raise ArgumentError(f"the mixture's schedule has the steps {steps}", hint="use ascending steps from 0")


class Mixture:
    """The assignment of rows to sources. All methods are thread-safe and accept steps in any order."""

    def __init__(self, config: MixConfig, tokens: Mapping[str, int], *, rows_per_step: int) -> None:
        """`tokens` maps the name of each source to its number of tokens."""
        self.names = tuple(tokens)
        self.rows_per_step = rows_per_step
        points = config.schedule or (MixPoint(step=0, weights=config.weights or dict(tokens)),)
        self._steps = np.array([point.step for point in points], np.int64)
        self._shares = np.stack([_shares(point.weights, self.names, config.temperature) for point in points])
        self._kept = [(0,) * len(self.names)]  # counts at step 0, STRIDE, 2 STRIDE, ...
        self._block: tuple[int, list[tuple[int, ...]]] | None = None  # the last computed block, and its counts
        self._lock = threading.Lock()

    def shares(self, step: int) -> dict[str, float]:
        """The fraction of step `step` that each source should have."""
        return dict(zip(self.names, self._shares_at(np.array([step]))[0].tolist(), strict=True))

    def counts(self, step: int) -> tuple[int, ...]:
        """Number of rows of each source in the steps before `step`."""
        if len(self.names) == 1:
            return (step * self.rows_per_step,)
        with self._lock:
            block = step // STRIDE
            while len(self._kept) <= block:
                self._kept.append(self._block_counts(len(self._kept) - 1)[-1])
            if self._block is None or self._block[0] != block:
                self._block = (block, self._block_counts(block))
            return self._block[1][step % STRIDE]

    def rows(self, step: int) -> list[tuple[int, int]]:
        """For each row of `step`: its source, and the number of earlier rows of that source. Sources are
        interleaved."""
        before, after = self.counts(step), self.counts(step + 1)
        spread = []
        for source, (first, last) in enumerate(zip(before, after, strict=True)):
            spread += [((n - first + 0.5) / (last - first), source, n) for n in range(first, last)]
        return [(source, n) for _, source, n in sorted(spread)]

    def ideal(self, steps: np.ndarray) -> np.ndarray:
        """I(s), [len(steps), sources] float64: the ideal number of rows of each source before each step."""
        total = np.zeros((len(steps), len(self.names)))
        knots = [0, *self._steps.tolist()]
        shares = np.concatenate((self._shares[:1], self._shares))
        for i, start in enumerate(knots):
            last = i + 1 == len(knots)
            length = None if last else knots[i + 1] - start
            n = np.clip(steps - start, 0, length).astype(np.float64)[:, None]  # steps of this interval before s
            slope = np.zeros(len(self.names)) if last or not length else (shares[i + 1] - shares[i]) / length
            total += n * shares[i] + n * (n - 1) / 2 * slope
        return total * self.rows_per_step

    def _shares_at(self, steps: np.ndarray) -> np.ndarray:
        return np.stack([np.interp(steps, self._steps, column) for column in self._shares.T], axis=1)

    def _block_counts(self, block: int) -> list[tuple[int, ...]]:
        """Counts at each step of a block, and at the first step after it."""
        steps = np.arange(block * STRIDE, (block + 1) * STRIDE + 1)
        due = np.floor(self.ideal(steps) + SLACK)
        ahead = np.maximum(self.ideal(steps) - due, 0)  # the fraction of the next row that is already due
        with np.errstate(divide="ignore", invalid="ignore"):
            wait = np.where(ahead > SLACK, (1 - ahead) / self._shares_at(steps), np.inf)  # rows until it is due
        plan = zip(steps.tolist(), due.astype(np.int64).tolist(), wait.tolist(), strict=True)
        counts = [self._kept[block]]
        for step, step_due, step_wait in list(plan)[1:]:
            counts.append(self._assign(step, step_due, step_wait, counts[-1]))
        return counts

    def _assign(self, step: int, due: list[int], wait: list[float], before: tuple[int, ...]) -> tuple[int, ...]:
        """Counts at `step` from the counts one step earlier: the rows that are due, then the earliest deadlines."""
        counts = list(map(max, before, due))
        left = step * self.rows_per_step - sum(counts)
        if left:
            # a source that already has its next row comes last; fewer rows are left than there are sources
            order = sorted(
                (have > floor, time, i) for i, (have, floor, time) in enumerate(zip(counts, due, wait, strict=True))
            )
            for _, _, i in order[:left]:
                counts[i] += 1
        return tuple(counts)


def _shares(weights: Mapping[str, float], names: tuple[str, ...], temperature: float) -> np.ndarray:
    """p ∝ w^(1/τ) in the order of `names`, as multiples of 1/GRAIN that sum to 1."""
    for name in weights:
        UnknownName.check("source in this mixture", name, names)
    missing = [name for name in names if name not in weights]
    if missing:
        raise ArgumentError(f"the mixture has no weight for {', '.join(missing)}", hint="use 0 to leave a source out")
    given = np.array([weights[name] for name in names], np.float64)
    if not (np.isfinite(given).all() and (given >= 0).all() and given.sum() > 0):
        raise ArgumentError(
            f"the weights of the mixture are {dict(weights)}", hint="give numbers of 0 or more, at least one above 0"
        )
    powers = (given / given.max()) ** (1 / temperature)
    grains = np.rint(powers / powers.sum() * GRAIN)
    grains[given > 0] = np.maximum(grains[given > 0], 1)
    grains[np.argmax(grains)] += GRAIN - grains.sum()
    return grains / GRAIN
