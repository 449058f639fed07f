"""A plant: inputs with units, a target and limited quantities as functions of them, and its optimum per context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

Values = Mapping[str, np.ndarray]
PENALTY = 10.0  # a limit passed by 1 % costs as much as 10 % of the target


class Input(NamedTuple):
    name: str
    unit: str
    low: float
    high: float


class Limit(NamedTuple):
    name: str
    unit: str
    above: bool  # the quantity must be at or above the bound, else at or below it
    bound: float

    @property
    def text(self) -> str:
        return f"{self.name} {'>=' if self.above else '<='} {self.bound:g}"


@dataclass(frozen=True)
class Plant:
    """`physics` maps inputs in their units to the target and the limited quantities, without noise. Functions of this
    class take settings `x` and contexts `c` as shares of their ranges: arrays [rows, inputs] from 0 to 1."""

    name: str
    settings: tuple[Input, ...]
    contexts: tuple[Input, ...]
    target: str
    unit: str
    goal: Literal["max", "min"]
    physics: Callable[[Values], Values]
    limits: tuple[Limit, ...] = ()

    def units(self, x: np.ndarray, c: np.ndarray) -> dict[str, np.ndarray]:
        """The inputs in their units, by name."""
        both = np.hstack([x, c])
        named = (*self.settings, *self.contexts)
        return {i.name: i.low + both[:, j] * (i.high - i.low) for j, i in enumerate(named)}

    def truth(self, x: np.ndarray, c: np.ndarray) -> Values:
        return self.physics(self.units(x, c))

    def merit(self, x: np.ndarray, c: np.ndarray) -> np.ndarray:
        """The target as a number to maximise, less a penalty where a limit is passed."""
        found = self.truth(x, c)
        value = found[self.target]
        over = np.zeros(len(x))
        for limit in self.limits:
            ratio = found[limit.name] / limit.bound
            over = np.maximum(over, 1 - ratio if limit.above else ratio - 1)
        return (value if self.goal == "max" else -value) - PENALTY * np.abs(value) * np.maximum(over, 0)

    @cached_property
    def spread(self) -> dict[str, float]:
        """The standard deviation of each quantity over the whole box: the scale of noise."""
        rng = np.random.default_rng(0)
        x, c = rng.random((4000, len(self.settings))), rng.random((4000, len(self.contexts)))
        return {name: float(np.std(values)) for name, values in self.truth(x, c).items()}

    def optimum(self, c: np.ndarray, *, tries: int = 8000) -> tuple[np.ndarray, float]:
        """The best settings for one context, and their merit: random search over the box, then smaller steps around the
        best twenty."""
        rng = np.random.default_rng(1)
        x = rng.random((tries, len(self.settings)))
        width = 0.2
        for _ in range(14):
            merit = self.merit(x, np.repeat(c[None], len(x), 0))
            best = x[np.argsort(-merit)[:20]]
            around = best[rng.integers(20, size=600)] + width * rng.standard_normal((600, x.shape[1]))
            x = np.vstack([best, np.clip(around, 0, 1)])
            width *= 0.6
        merit = self.merit(x, np.repeat(c[None], len(x), 0))
        return x[merit.argmax()], float(merit.max())
