"""The weights that a step with a delay is computed with: the servers' last values, and what this worker knows of later
updates.

With momentum 0.9, gradients of weights that are d updates old are stable only up to a curvature × rate of 38, 1.0,
0.51, 0.35, 0.26 for d = 0 to 4 (along an eigenvector; tests/parallel/server/test_delay.py): one update costs a factor
of 38, and a quarter of the rate does not win it back. So a worker runs the servers' rule on their last values with its
own gradients of the updates that they do not have, times the number of workers (read-my-writes, Ho et al. 2013, for any
elementwise rule). With one worker nothing is old then: the run equals that without a delay.

Of the states, second moments are the servers', because a worker's gradient has more noise, and its steps would be too
short. First moments are of this worker's own gradients: with the servers' the difference between two workers is stable
only up to 5.3 instead of 10 for d = 2. Reading costs pulls of the states (3 N values instead of N with AdamW), and a
worker keeps its first moments of the updates in flight.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bagu.parallel.server.client import Client
from bagu.train.optim.optimizer import RULES
from bagu.train.served.update import update_of

FIRST_MOMENTS = ("velocity", "exp_avg")


class Ahead:
    """Reads weights as they are expected to be after the updates in flight."""

    def __init__(self, client: Client, rule: Mapping[str, Any]) -> None:
        self.client, self.ranges = client, client.session.ranges
        self._updates = [update_of(rule, r.number) for r in self.ranges]
        self._moments = [row for row, name in enumerate(RULES[rule["kind"]][1], 1) if name in FIRST_MOMENTS]
        self._expected: dict[int, Mapping[str, Any]] = {}  # decisions about own gradients, by update
        self._own: dict[int, list[np.ndarray]] = {}  # first moments after an update, by range

    def expect(self, t: int, flat: np.ndarray, gradient: np.ndarray, decision: Mapping[str, Any] | None) -> None:
        """How update t would be made of this worker's gradient at `flat` alone; None: it is not finite."""
        if decision is not None:
            self._expected[t] = decision
        if not self._moments:
            return
        before, after = self._own.get(t - 1), list[np.ndarray]()
        for r, update, (_, _, held, _) in zip(self.ranges, self._updates, self.client.ahead(0), strict=True):
            moments = before[r.number] if before is not None else held[self._moments] if held is not None else None
            if moments is None:
                return  # the states are on their way
            if held is not None and decision is not None:
                rows = held.copy()
                rows[0], rows[self._moments] = r.take(flat), moments
                update(rows, r.take(gradient), decision)
                moments = rows[self._moments]
            after.append(moments)
        self._own[t] = after

    def refuse(self, t: int) -> None:
        """Update t was decided: it changes nothing."""
        self._expected.pop(t, None)

    def read(self, flat: np.ndarray, last: int) -> int:
        """Write the weights that are expected after update `last` into a flat array; return the oldest version among
        the values that they come from. A range that came without states has its values alone."""
        held = self.client.ahead(last)
        for r, update, (version, values, rows, pushes) in zip(self.ranges, self._updates, held, strict=True):
            mine = [(self._expected[t], gradient) for t, gradient in pushes if t in self._expected]
            if rows is not None and mine:
                rows = rows.copy()
                if version in self._own:
                    rows[self._moments] = self._own[version][r.number]
                for decision, gradient in mine:
                    update(rows, gradient.copy(), decision)
                values = rows[0]
            r.put(flat, values)
        oldest = min(version for version, _, _, _ in held)
        self._expected = {t: decision for t, decision in self._expected.items() if t > oldest}
        self._own = {t: moments for t, moments in self._own.items() if t >= oldest}
        return oldest
