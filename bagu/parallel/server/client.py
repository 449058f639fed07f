"""A worker's connection to the servers: the session of session.py on sockets, with waiting and its time."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bagu.parallel.server.compress import Method
from bagu.parallel.server.keys import ranges_of
from bagu.parallel.server.links import Link, connect
from bagu.parallel.server.membership import BEAT_S, Map
from bagu.parallel.server.node import Out
from bagu.parallel.server.session import ServersFailed, Session
from bagu.parallel.server.store import Total
from bagu.parallel.server.wire import Message

AGAIN_S = 10.0  # open requests are sent again; after a death they are at once, with the new map
LOST_S = 0.3  # after a link has ended, if no new map comes


class Client:
    """Pushes, commits and pulls over all ranges. Thread-safe for one caller and the threads of its links.

    `waited_s` is the time that the caller waited for other workers or servers since it was last read.
    """

    def __init__(
        self, worker: int, segments: Sequence[tuple[int, int]], servers: int, dtype: np.dtype, manager: tuple[str, int],
        token: str, *, method: Method = "none", who: str = "worker",
    ) -> None:  # fmt: skip
        self.session = Session(worker, ranges_of(segments, servers), dtype, method)
        self.worker, self.who, self.token, self._manager_at = worker, who, token, manager
        self._changed = threading.Condition(threading.RLock())
        self._links: dict[int, Link] = {}
        self._manager: Link | None = None
        self._empty_since: float | None = None
        self._lost_at: float | None = None  # when a message could not be sent, or a link ended
        self.waited_s = 0.0
        self.clock: Mapping[str, Any] = {}  # sent to the manager, for `bagu watch`
        self._status: Mapping[str, Any] = {}  # the manager's last answer to `fresh`
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def delay(self) -> int | None:
        """The bound that was set while the run runs, if any."""
        return self.session.map.delay

    def wait_for_map(self) -> None:
        self._wait(lambda: self.session.map.epoch > 0, "the manager's first map")

    @property
    def unloaded(self) -> bool:
        """Whether some range has no values yet."""
        return bool(self.session.map.empty)

    # --- requests -----------------------------------------------------------------------------------------------------

    def push(self, t: int, flat: np.ndarray, row: Sequence[float]) -> None:
        with self._changed:
            self._send(self.session.push(t, flat, row))

    def total(self, t: int, *, within: float | None = None) -> Total | None:
        """The sums of update t; None if some worker has not pushed `within` so many seconds."""
        self._wait(lambda: self.session.total(t) is not None, f"update {t} of all workers", within)
        with self._changed:
            return self.session.total(t)

    def commit(self, t: int, decision: Mapping[str, Any], *, pull: bool = True, wait: bool = True) -> None:
        """Decide update t; with `pull`, ask for the values after it, and with `wait` return when they are here: all
        servers have the update then."""
        with self._changed:
            self._send(self.session.commit(t, decision, pull=pull))
        if pull and wait:
            self.wait_for_values(t)

    def wait_for_values(self, t: int, *, within: float | None = None) -> None:
        """Return when values of version t or later, which were asked for, are here, or `within` so many seconds."""
        self._wait(lambda: self.session.has_values(t), f"the values after update {t}", within)

    def load(
        self, t: int, rows: Sequence[np.ndarray], rule: Mapping[str, Any], workers: int, decision: Mapping[str, Any]
    ) -> None:
        with self._changed:
            self._send(self.session.load(t, rows, rule, workers, decision))
        self._wait(lambda: self.session.has_values(t), "the servers to load the state")

    def pull(self, t: int) -> None:
        """Have values of version t or later."""
        with self._changed:
            self._send(self.session.pull(t))
        self._wait(lambda: self.session.has_values(t), f"values of version {t}")

    def memory(self, t: int, rows: Sequence[np.ndarray]) -> None:
        """Write the values and states of version t into flat arrays. No worker may push a later update meanwhile."""
        with self._changed:
            self._send(self.session.pull(t, whole=True))
        ranges = self.session.ranges
        self._wait(lambda: len(self.session.memories) == len(ranges), f"the states of version {t}")
        with self._changed:
            for r in ranges:
                for row, values in zip(rows, self.session.memories[r.number], strict=True):
                    r.put(row, values)
            self.session.memories = {}

    def newest(self, *, at_least: int = 0) -> None:
        """Have the newest values: a rollout engine's read. Versions below `at_least` are not taken."""
        with self._changed:
            self.session.versions = {}
        self.pull(at_least)

    def fresh(self, most_age: int) -> bool:
        """Have values at most `most_age` updates older than those of the servers' last heartbeats; whether new ones
        were read. If they are young enough, nothing but the manager's status is sent."""
        with self._changed:
            self._status = {}
            while not self._status.get("holders"):
                self._check()
                if self._manager is not None:
                    self._manager.send(Message(kind="status"))
                self._changed.wait(BEAT_S)
            versions = [facts.get("versions", {}) for _, facts in self._status["servers"]]
        numbers = [str(r.number) for r in self.session.ranges]
        newest = min(max((have.get(number, -1) for have in versions), default=-1) for number in numbers)
        if self.version >= 0 and newest - self.version <= most_age:
            return False
        self.newest(at_least=max(0, newest - most_age))
        return True

    @property
    def version(self) -> int:
        """The oldest version among the ranges of the values that came last."""
        with self._changed:
            return min(self.session.versions.get(r.number, -1) for r in self.session.ranges)

    def read(self, flat: np.ndarray, moves: Mapping[int, np.ndarray] | None = None) -> int:
        with self._changed:
            return self.session.read(flat, moves)

    def close(self) -> None:
        self._ended.set()
        with self._changed:
            for link in (*self._links.values(), *filter(None, [self._manager])):
                link.close()

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, ready: Callable[[], bool], what: str, within: float | None = None) -> None:
        begun = again = now = time.monotonic()
        with self._changed:
            while not ready() and (within is None or now - begun < within):
                self._check()
                self._changed.wait(0.05 if within is None else min(0.05, begun + within - now))
                now = time.monotonic()
                if now - again > AGAIN_S or (self._lost_at is not None and now - self._lost_at > LOST_S):
                    again, self._lost_at = now, None
                    self._send(self.session.again())
        self.waited_s += time.monotonic() - begun

    def _check(self) -> None:
        """Raise if the servers cannot go on. An empty range may only be one whose heartbeat is on its way."""
        try:
            self.session.check()
            self._empty_since = None
        except ServersFailed:
            now = time.monotonic()
            self._empty_since = self._empty_since or now
            if self.session.refused is not None or now - self._empty_since > 2.0:
                raise

    def _send(self, out: list[Out]) -> None:
        for to, m in out:
            link = self._link(to[1])
            if link is not None:
                link.send(m)
            else:
                self._lost_at = time.monotonic()

    def _link(self, slot: int) -> Link | None:
        if slot not in self._links and (address := self.session.map.addresses.get(slot)) is not None:
            hello = Message(kind="hello", more={"who": self.who, "number": self.worker})
            with contextlib.suppress(OSError):
                link = connect(address, self.token, hello, self._message, self._gone)
                link.peer = ("server", slot)
                self._links[slot] = link
        return self._links.get(slot)

    def _gone(self, link: Link) -> None:
        with self._changed:
            if self._links.get(link.peer[1]) is link:
                del self._links[link.peer[1]]
                self._lost_at = time.monotonic()

    def _message(self, link: Link, m: Message) -> None:
        with self._changed:
            if m.kind == "map":
                self._take(Map.read(m.more))
            elif m.kind == "status":
                self._status = m.more
            else:
                self._send(self.session.handle(link.peer, m))
            self._changed.notify_all()

    def _take(self, map: Map) -> None:
        if map.epoch <= self.session.map.epoch:
            return
        for slot, link in list(self._links.items()):
            if self.session.map.births.get(slot) != map.births.get(slot):
                link.close()
                del self._links[slot]
        self._send(self.session.set_map(map))

    def _run(self) -> None:
        """Keep the link to the manager."""
        hello = Message(kind="hello", more={"who": self.who, "number": self.worker})
        while not self._ended.is_set():
            with self._changed:
                if self._manager is None:
                    with contextlib.suppress(OSError):
                        self._manager = connect(self._manager_at, self.token, hello, self._message, self._manager_gone)
                elif self.clock:
                    self._manager.send(Message(kind="beat", more=self.clock))
            self._ended.wait(BEAT_S)

    def _manager_gone(self, link: Link) -> None:
        with self._changed:
            if self._manager is link:
                self._manager = None
