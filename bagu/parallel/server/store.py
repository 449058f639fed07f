"""A range on one server: its values with the optimizer's state, the pushes that wait, and its clock.

Updates are numbered. Update t of a range is the sum of the pushes (worker, t) of all workers, in the order of worker
numbers, applied once by a decision that every worker makes from the same totals (learning rate, clipping, or to skip).
So a push or a decision that comes twice changes nothing, and the bits do not depend on the order of arrival.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bagu.parallel.server.compress import Method, decode

KEPT = 64  # totals of past updates: a worker that lost an answer asks again, and is at most the delay behind

# memory [1 + k, n]: values and k states, changed in place; gradient [n]; the decision
Update = Callable[[np.ndarray, np.ndarray, Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a range is, from the worker that loads it: `layout` names the keys, `rule` the update rule."""

    rows: int  # 1 + the number of states
    size: int
    dtype: str
    layout: str
    workers: int
    rule: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Total:
    """The sum of an update over its workers: its squared norm, and the scalars that each worker sent along."""

    square: float
    rows: list[list[float]]

    def more(self) -> dict[str, Any]:
        return {"square": self.square, "rows": self.rows}


@dataclass(kw_only=True)
class Waiting:
    """Update t before it is applied."""

    parts: dict[int, np.ndarray] = field(default_factory=dict)
    rows: dict[int, list[float]] = field(default_factory=dict)
    sum: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Applied:
    """An update as its copies get it: the decision, and the summed gradient (none if it was skipped)."""

    decision: Mapping[str, Any]
    total: Total
    gradient: np.ndarray | None


class Store:
    """The state of a range at `version`, the number of its last update; -1: nothing is loaded."""

    def __init__(self, make: Callable[[Mapping[str, Any], int], Update], number: int) -> None:
        self._make, self.number = make, number
        self.version = -1
        self.spec: Spec | None = None
        self.memory = np.empty((0, 0))
        self.update: Update | None = None
        self.decision: Mapping[str, Any] = {}  # of the last update
        self.totals: dict[int, Total] = {}
        self.waiting: dict[int, Waiting] = {}
        self.decisions: dict[int, Mapping[str, Any]] = {}  # that came before their sums

    @property
    def values(self) -> np.ndarray:
        return self.memory[0]

    def install(self, version: int, spec: Spec, memory: np.ndarray, more: Mapping[str, Any]) -> None:
        """Take a whole state, unless this one is as new."""
        if version <= self.version:
            return
        if self.spec is None or self.spec.rule != spec.rule:
            self.update = self._make(spec.rule, self.number)
        self.spec, self.version = spec, version
        self.memory = memory.view(spec.dtype).reshape(spec.rows, spec.size).copy()
        self.decision = more.get("decision", {})
        self.totals = {int(t): Total(**total) for t, total in more.get("totals", {}).items()}
        self._forget()

    def push(self, worker: int, t: int, data: np.ndarray, method: Method, row: list[float]) -> bool:
        """Add a worker's part of update t, once. Returns whether the sum became complete by it."""
        assert self.spec is not None
        if t <= self.version:
            return False
        waiting = self.waiting.setdefault(t, Waiting())
        if worker in waiting.rows:
            return False
        part = decode(method, data, self.spec.size, np.dtype(self.spec.dtype))
        waiting.parts[worker], waiting.rows[worker] = part, row
        if len(waiting.rows) < self.spec.workers:
            return False
        first, *others = (waiting.parts[w] for w in sorted(waiting.parts))
        waiting.sum = first.copy()
        for other in others:
            waiting.sum += other
        waiting.parts = {}
        square = (
            float(np.dot(waiting.sum, waiting.sum)) if np.dtype(self.spec.dtype).itemsize == 8 else _square(waiting.sum)
        )
        self.totals[t] = Total(square=square, rows=[waiting.rows[w] for w in sorted(waiting.rows)])
        return True

    def decide(self, t: int, decision: Mapping[str, Any]) -> None:
        """What to do with update t, by the first worker that says it: all say the same."""
        if t > self.version:
            self.decisions.setdefault(t, decision)

    def advance(self) -> list[tuple[int, Applied]]:
        """Apply the updates that are complete and decided, in order."""
        done = []
        while (t := self.version + 1) in self.decisions and t in self.waiting and self.waiting[t].sum is not None:
            decision, gradient = self.decisions[t], self.waiting[t].sum
            applied = Applied(
                decision=decision, total=self.totals[t], gradient=None if decision.get("skip") else gradient
            )
            self.apply(t, applied)
            done.append((t, applied))
        return done

    def apply(self, t: int, applied: Applied) -> None:
        """Run update number `version + 1`."""
        assert t == self.version + 1 and self.update is not None
        if applied.gradient is not None:
            self.update(self.memory, applied.gradient.copy(), applied.decision)
        self.version, self.decision, self.totals[t] = t, applied.decision, applied.total
        self._forget()

    def state(self) -> dict[str, Any]:
        """What `install` needs besides the memory."""
        assert self.spec is not None
        return {
            "spec": vars(self.spec),
            "decision": self.decision,
            "totals": {t: total.more() for t, total in self.totals.items() if t <= self.version},
        }

    def _forget(self) -> None:
        self.waiting = {t: w for t, w in self.waiting.items() if t > self.version}
        self.decisions = {t: d for t, d in self.decisions.items() if t > self.version}
        self.totals = {t: total for t, total in self.totals.items() if t > self.version - KEPT}


def _square(values: np.ndarray) -> float:
    """The squared norm of fp32 values, added in fp64: as one block of 2²⁰ values at a time, to need little memory."""
    return sum(
        float(np.square(values[at : at + (1 << 20)], dtype=np.float64).sum()) for at in range(0, len(values), 1 << 20)
    )
