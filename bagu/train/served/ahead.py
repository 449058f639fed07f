"""The weights that a step with a delay is computed with: the servers' last values, and what this worker knows of later
updates.

With momentum 0.9, gradients of weights that are d updates old are stable only up to a curvature × rate of 38, 1.0,
0.51, 0.35, 0.26 for d = 0 to 4 (along an eigenvector; tests/parallel/server/test_delay.py): one update costs a factor of
38, and a smaller rate does not win it back. So a worker runs the servers' rule on their last values and states with its
own gradients of the updates that they do not have, times the number of workers (read-my-writes, Ho et al. 2013, for any
elementwise rule). Only the other workers' difference from its own gradients is then old. With one worker nothing is:
the run equals that without a delay. It costs pulls of states: 3 N instead of N values with AdamW.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bagu.parallel.server.client import Client
from bagu.train.served.update import update_of


class Ahead:
    """Reads weights as they are expected to be after the updates in flight."""

    def __init__(self, client: Client, rule: Mapping[str, Any]) -> None:
        self.client, self.ranges = client, client.session.ranges
        self._updates = [update_of(rule, r.number) for r in self.ranges]
        self._expected: dict[int, Mapping[str, Any]] = {}  # decisions about own gradients, by update

    def expect(self, t: int, decision: Mapping[str, Any]) -> None:
        """How update t would be made of this worker's gradient alone."""
        self._expected[t] = decision

    def refuse(self, t: int) -> None:
        """Update t was decided: it changes nothing."""
        self._expected.pop(t, None)

    def read(self, flat: np.ndarray, last: int) -> int:
        """Write the weights that are expected after update `last` into a flat array; return the oldest version among
        the values that they come from. A range that came without states has its values alone."""
        held = self.client.ahead(last)
        for r, update, (_, values, rows, pushes) in zip(self.ranges, self._updates, held, strict=True):
            mine = [(self._expected[t], g) for t, g in pushes if t in self._expected]
            if rows is not None and mine:
                rows = rows.copy()
                for decision, gradient in mine:
                    update(rows, gradient.copy(), decision)
                values = rows[0]
            r.put(flat, values)
        version = min(version for version, _, _, _ in held)
        self._expected = {t: decision for t, decision in self._expected.items() if t > version}
        return version
