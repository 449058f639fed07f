"""The weights y of a worker in a run with a delay: it applies its own updates at once, and approaches the servers'.

    u                             its update: the rule with states of its own gradients, as if all workers had them,
                                  at a rate that undoes what their greater noise takes (`_faster`)
    y ← y + α (x + Σ u − y)       x the servers' last values, Σ u its updates that these do not include
    y ← y + u                     after its gradient at y; the servers get u / workers and add those of all workers

The servers' values are the mean of the workers' weights, whatever the rule and the delay: only differences of workers
are old. Old gradients alone do not train: with momentum 0.9 those that are d updates old are stable up to a
curvature × rate of 38, 1.0, 0.51, 0.35, 0.26 for d = 0 to 4 (along an eigenvector; test_delay.py).
A difference of workers is stable up to 28, 11, 5.1, 3.0 for d = 1 to 4 with α = 0.5, and 37, 29, 37, 33 with 0.05;
the smaller α loses more by the distance of the workers than it gains (journal 022).

With one worker nothing is old: the run equals that without a delay. Reading and pushing cost the bytes of any run; a
worker keeps the rule's states, and one flat array for each update in flight.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from bagu.parallel.server.client import Client
from bagu.parallel.server.rules import update_of
from bagu.train.optim.optimizer import RULES

PULL = 0.5  # α with a delay of at most 4; 0.2 / delay above
ROOTED = ("adagrad", "rmsprop", "adam", "adamw")  # rules that divide by the root of a mean of squares
MEMORY = 0.99  # of the means in `_faster`, by step


class Ahead:
    """The updates of one worker by `rule`, its moves. `states` are flat, one after another."""

    def __init__(self, client: Client, rule: Mapping[str, Any], states: list[np.ndarray], workers: int) -> None:
        assert len(states) == len(RULES[rule["kind"]][1])
        self.client, self.ranges = client, client.session.ranges
        self._updates = [update_of(rule, r.number) for r in self.ranges]
        self._states = [[r.take(state) for state in states] for r in self.ranges]
        self._moves: dict[int, np.ndarray] = {}  # by update, while it is in flight
        self._workers = workers if rule["kind"] in ROOTED else 1
        self._last: np.ndarray | None = None  # gradient
        self._square = self._product = 0.0  # means of g·g, and of g with the one before

    def move(self, t: int, flat: np.ndarray, gradient: np.ndarray, decision: Mapping[str, Any] | None) -> np.ndarray:
        """Move `flat` by the `gradient` at it, as a part of update t; none if the gradient is not finite. Returns the
        move."""
        moved = self._moves[t] = np.zeros_like(flat)
        if decision is not None:
            decision = {**decision, "lr": decision["lr"] * self._faster(gradient)}
            for r, update in zip(self.ranges, self._updates, strict=True):
                before = r.take(flat)
                memory = np.stack([before, *self._states[r.number]])
                update(memory, r.take(gradient), decision)
                r.put(moved, memory[0] - before)
                self._states[r.number] = list(memory[1:])
            flat += moved
        return moved

    def _faster(self, gradient: np.ndarray) -> float:
        """How much smaller the rule's steps are here than without a delay: it divides by the root of E[g²] of this
        worker's gradients, which have more noise than the mean of all workers'. Consecutive gradients have noise of
        their own, so that their product is what the workers have in common."""
        if self._workers == 1:
            return 1.0
        last, self._last = self._last, gradient.copy()
        if last is None:
            return 1.0
        self._square += (1 - MEMORY) * (float(gradient @ gradient) - self._square)
        self._product += (1 - MEMORY) * (float(gradient @ last) - self._product)
        common = min(max(self._product / self._square, 0.0), 1.0) if self._square else 1.0
        return math.sqrt(self._workers / (1 + (self._workers - 1) * common))

    def refuse(self, t: int, flat: np.ndarray) -> None:
        """Update t was decided: it changes nothing."""
        flat -= self._moves.pop(t, 0)

    def approach(self, flat: np.ndarray, delay: int) -> int:
        """Move `flat` toward the servers' values with the moves in flight; return the oldest version of the values."""
        there = np.empty_like(flat)
        oldest = self.client.read(there, self._moves)
        self._moves = {t: move for t, move in self._moves.items() if t > oldest}
        flat += (PULL if delay <= 4 else 0.2 / delay) * (there - flat) if delay else there - flat
        return oldest

    def states(self, rows: list[np.ndarray]) -> None:
        """Write the states into flat arrays."""
        for r in self.ranges:
            for row, state in zip(rows, self._states[r.number], strict=True):
                r.put(row, state)
