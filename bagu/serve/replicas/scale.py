"""How many replicas: one more while requests would wait, one fewer while fewer would do.

The signal is the wait that the router predicts for the next request, not the length of a queue: ten short requests are
no reason to start an engine, one long prompt may be. Two thresholds and the time for which one of them must hold keep
the number from swinging: a replica is started if the wait is above `GROW_WAIT_S` and does not fall for `GROW_FOR_S`,
and stopped if the work of the last `SHRINK_FOR_S` fills less than `SHRINK_LOAD` of the replicas that would be left. A
wait that falls is a queue that the replicas work off. One starts or ends at a time.
"""

from typing import Literal

TICK_S = 0.25  # how often the number is considered
BUSY_MEMORY = 0.9  # weight of the ticks before in `busy`
GROW_WAIT_S, GROW_FOR_S, FALLING = 0.5, 2.0, 0.9
SHRINK_LOAD, SHRINK_FOR_S = 0.5, 30.0
Change = Literal["grow", "shrink"]


class Scaler:
    def __init__(
        self,
        least: int,
        most: int,
        *,
        grow_wait_s: float = GROW_WAIT_S,
        grow_for_s: float = GROW_FOR_S,
        shrink_load: float = SHRINK_LOAD,
        shrink_for_s: float = SHRINK_FOR_S,
    ) -> None:
        self.least, self.most = least, most
        self.grow_wait_s, self.grow_for_s = grow_wait_s, grow_for_s
        self.shrink_load, self.shrink_for_s = shrink_load, shrink_for_s
        self._waits_since: float | None = None
        self._wait_then = 0.0
        self._idle_since: float | None = None

    def decide(self, now: float, *, ready: int, changing: int, wait_s: float, busy: float) -> Change | None:
        """`ready` replicas take requests and `changing` ones start or end. `wait_s` is the least wait that is predicted
        for a request that comes now, `busy` how many of the ready replicas have work, on average of late."""
        if self._waits_since is None or wait_s < FALLING * self._wait_then:
            self._waits_since, self._wait_then = None, wait_s
        self._waits_since = _since(self._waits_since, wait_s > self.grow_wait_s, now)
        fewer = max(1, ready - 1)
        self._idle_since = _since(self._idle_since, busy < self.shrink_load * fewer, now)
        if changing:  # what it will do is not known yet
            self._waits_since = self._idle_since = None
            return None
        if ready < self.most and self._waits_since is not None and now - self._waits_since >= self.grow_for_s:
            self._waits_since = self._idle_since = None
            return "grow"
        if ready > self.least and self._idle_since is not None and now - self._idle_since >= self.shrink_for_s:
            self._waits_since = self._idle_since = None
            return "shrink"
        return None


def _since(since: float | None, holds: bool, now: float) -> float | None:
    return None if not holds else now if since is None else since
