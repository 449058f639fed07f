"""The weights y of a worker in a run with a delay: it applies its own updates at once, and approaches the servers'.

    u                             its update: the rule with states of its own gradients, as if all workers had them
    y ← y + α (x + Σ u − y)       x the servers' last values, Σ u its updates that these do not include
    y ← y + u                     after its gradient at y; the servers get u / workers and add those of all workers

The servers' values are the mean of the workers' weights, whatever the rule and the delay: only differences of workers
are old. Old gradients alone do not train: with momentum 0.9 those that are d updates old are stable up to a
curvature × rate of 38, 1.0, 0.51, 0.35, 0.26 for d = 0 to 4 (along an eigenvector; test_delay.py).
A difference of workers is stable up to 19, 10, 5.3, 3.2 for d = 1 to 4 with α = 1, and 37, 29, 37, 33 with 0.05.

With one worker nothing is old: the run equals that without a delay. Reading and pushing cost the bytes of any run; a
worker keeps the rule's states, and one flat array for each update in flight.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bagu.parallel.server.client import Client
from bagu.train.optim.optimizer import RULES
from bagu.train.served.update import update_of

PULL = 0.05  # α with a delay of at most 4; 0.2 / delay above


class Ahead:
    """The updates of one worker by `rule`, its moves. `states` are flat, one after another."""

    def __init__(self, client: Client, rule: Mapping[str, Any], states: list[np.ndarray]) -> None:
        assert len(states) == len(RULES[rule["kind"]][1])
        self.client, self.ranges = client, client.session.ranges
        self._updates = [update_of(rule, r.number) for r in self.ranges]
        self._states = [[r.take(state) for state in states] for r in self.ranges]
        self._moves: dict[int, np.ndarray] = {}  # by update, while it is in flight

    def move(self, t: int, flat: np.ndarray, gradient: np.ndarray, decision: Mapping[str, Any] | None) -> np.ndarray:
        """Move `flat` by the `gradient` at it, as a part of update t; none if the gradient is not finite. Returns the
        move."""
        moved = self._moves[t] = np.zeros_like(flat)
        if decision is not None:
            for r, update in zip(self.ranges, self._updates, strict=True):
                before = r.take(flat)
                memory = np.stack([before, *self._states[r.number]])
                update(memory, r.take(gradient), decision)
                r.put(moved, memory[0] - before)
                self._states[r.number] = list(memory[1:])
            flat += moved
        return moved

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
