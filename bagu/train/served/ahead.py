"""The weights that a step with a delay is computed with: the servers' last values, and this worker's own part of the
updates that are on their way.

With momentum 0.9, gradients of weights that are d updates old are stable only up to a curvature × rate of 38, 1.0,
0.51, 0.35, 0.26 for d = 0 to 4 (along an eigenvector; tests/parallel/server/test_delay.py): one update costs a factor
of 38, and a quarter of the rate does not win it back. So a worker adds to what it reads how the updates in flight would
be if all workers had its own gradients (read-my-writes, Ho et al. 2013, for any elementwise rule). The mean of all
workers' places is then not old, to first order, and only their differences are. With one worker nothing is old: the run
equals that without a delay.

A worker runs the rule with states of its own gradients, so reading costs no more bytes; it keeps these states, and one
flat array for each update in flight.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bagu.parallel.server.client import Client
from bagu.train.optim.optimizer import RULES
from bagu.train.served.update import update_of


class Ahead:
    """What this worker's gradients do to the weights. `states` are those of the servers, flat, one after another."""

    def __init__(self, client: Client, rule: Mapping[str, Any], states: list[np.ndarray]) -> None:
        assert len(states) == len(RULES[rule["kind"]][1])
        self.client, self.ranges = client, client.session.ranges
        self._updates = [update_of(rule, r.number) for r in self.ranges]
        self._states = [[r.take(state) for state in states] for r in self.ranges]
        self._moves: dict[int, np.ndarray] = {}  # by update: what it would add

    def expect(self, t: int, flat: np.ndarray, gradient: np.ndarray, decision: Mapping[str, Any]) -> None:
        """Update t is in flight, with this worker's `gradient` at `flat`."""
        self._moves[t] = np.zeros_like(flat)
        for r, update in zip(self.ranges, self._updates, strict=True):
            before = r.take(flat)
            memory = np.stack([before, *self._states[r.number]])
            update(memory, r.take(gradient), decision)
            r.put(self._moves[t], memory[0] - before)
            self._states[r.number] = list(memory[1:])

    def refuse(self, t: int) -> None:
        """Update t was decided: it changes nothing."""
        self._moves.pop(t, None)

    def read(self, flat: np.ndarray) -> int:
        """Write the expected weights into a flat array; return the oldest version among the values they come from."""
        oldest = self.client.read(flat, self._moves)
        self._moves = {t: move for t, move in self._moves.items() if t > oldest}
        return oldest
