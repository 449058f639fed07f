"""A worker's side, as a function from messages to messages: what was asked and is not answered yet is asked again.

A worker keeps each push until the update is decided and all holders have it. After a new map, everything open goes to
the servers that serve its ranges now: one that took over has no pushes of the update that was being summed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bagu.errors import BaguError
from bagu.parallel.server.compress import Compressor, Method
from bagu.parallel.server.keys import Range, digest
from bagu.parallel.server.membership import Map
from bagu.parallel.server.node import Address, Out
from bagu.parallel.server.store import Total
from bagu.parallel.server.wire import Message


class ServersFailed(BaguError, RuntimeError):
    """The servers cannot go on: they refused a message, or a range is lost."""


class Session:
    """The open requests of one worker over `ranges`."""

    def __init__(self, worker: int, ranges: Sequence[Range], dtype: np.dtype, method: Method = "none") -> None:
        self.worker, self.ranges, self.dtype = worker, ranges, dtype
        self.layout, self.compressor = digest(ranges), Compressor(method)
        self.map = Map()
        self.open: dict[tuple[str, int, int], Message] = {}  # by (kind, t, range)
        self.kept: dict[int, list[Message]] = {}  # t: pushes, until the update is safe
        self.totals: dict[int, dict[int, Total]] = {}  # t: by range
        self.versions: dict[int, int] = {}  # of the values that came last, by range
        self.values: dict[int, np.ndarray] = {}
        self.decision: Mapping[str, Any] = {}  # the one that came with range 0
        self.memories: dict[int, np.ndarray] = {}  # by range: values and states
        self.refused: str | None = None
        self.sent = self.received = 0  # payload bytes of pushes and of values

    # --- requests -----------------------------------------------------------------------------------------------------

    def push(self, t: int, flat: np.ndarray, row: Sequence[float]) -> list[Out]:
        """Send this worker's gradient of update t, and the scalars of its step to range 0."""
        more = {"layout": self.layout, "method": self.compressor.method}
        self.kept[t] = [
            Message(
                kind="push",
                range=r.number,
                t=t,
                worker=self.worker,
                data=self.compressor.encode(r.number, r.take(flat)),
                more={**more, "row": list(row) if r.number == 0 else []},
            )
            for r in self.ranges
        ]
        self.sent += sum(m.data.nbytes for m in self.kept[t])
        return self._ask(self.kept[t])

    def commit(self, t: int, decision: Mapping[str, Any], *, pull: bool = True) -> list[Out]:
        """Say what update t is. The facts in the decision go to range 0 only."""
        self.totals.pop(t, None)
        bare = {name: value for name, value in decision.items() if name != "facts"}
        return self._ask(
            Message(
                kind="commit",
                range=r.number,
                t=t,
                worker=self.worker,
                more={"decision": bare if r.number else decision, "pull": pull},
            )
            for r in self.ranges
        )

    def load(
        self, t: int, rows: Sequence[np.ndarray], rule: Mapping[str, Any], workers: int, decision: Mapping[str, Any]
    ) -> list[Out]:
        """Give the servers a whole state as update t: values and optimizer states, all flat."""
        return self._ask(
            Message(
                kind="load", range=r.number, t=t, worker=self.worker, data=np.stack([r.take(row) for row in rows]),
                more={
                    "spec": {
                        "rows": len(rows), "size": r.size, "dtype": self.dtype.name, "layout": self.layout,
                        "workers": workers, "rule": rule,
                    },
                    "decision": decision if r.number == 0 else {},
                },
            )
            for r in self.ranges
        )  # fmt: skip

    def pull(self, t: int, *, whole: bool = False) -> list[Out]:
        """Ask for values of version t or later; with `whole`, with the optimizer's states."""
        if whole:
            self.memories = {}
        return self._ask(
            Message(kind="pull", range=r.number, t=t, worker=self.worker, more={"whole": whole}) for r in self.ranges
        )

    def _ask(self, messages: Any) -> list[Out]:
        keys = []
        for m in messages:
            key = (m.kind, m.t, m.range)
            if m.kind != "commit" or m.more["pull"]:  # a commit without values has no answer of its own
                self.open[key] = m
                keys.append(m)
            else:
                self.kept.setdefault(m.t, []).append(m)
                keys.append(m)
        return self._addressed(keys)

    def _addressed(self, messages: Any) -> list[Out]:
        return [
            (("server", self.map.holders[m.range][0]), replace(m, epoch=self.map.epoch))
            for m in messages
            if self.map.holders and self.map.holders[m.range]
        ]

    def again(self) -> list[Out]:
        """All open requests, with the pushes of updates that are not safe yet, before the commits about them."""
        order = {"load": 0, "push": 1, "commit": 2, "pull": 3}
        messages = {(m.kind, m.t, m.range): m for kept in self.kept.values() for m in kept} | self.open
        return self._addressed(sorted(messages.values(), key=lambda m: (m.t, order[m.kind])))

    # --- answers ------------------------------------------------------------------------------------------------------

    def set_map(self, map: Map) -> list[Out]:
        if map.epoch <= self.map.epoch:
            return []
        self.map = map
        return self.again()

    def handle(self, sender: Address, m: Message) -> list[Out]:
        if m.kind == "map":
            return self.set_map(Map.read(m.more))
        if m.kind == "refused":
            self.refused = m.more["reason"]
        elif m.kind == "total":
            self.totals.setdefault(m.t, {})[m.range] = Total(**m.more)
            self.open.pop(("push", m.t, m.range), None)
        elif m.kind == "values":
            self._take(m)
        elif m.kind == "memory":
            self.memories[m.range] = m.data.view(self.dtype).reshape(-1, m.more["size"])
            self.open.pop(("pull", m.t, m.range), None)
        return []

    def _take(self, m: Message) -> None:
        self.received += m.data.nbytes
        if m.t >= self.versions.get(m.range, -1):
            self.versions[m.range], self.values[m.range] = m.t, m.data.view(self.dtype)
            if m.range == 0:
                self.decision = m.more["decision"]
        for kind, t, number in list(self.open):
            if number == m.range and t <= m.t and kind != "push":
                del self.open[kind, t, number]
        safe = min(self.versions.get(r.number, -1) for r in self.ranges)
        self.kept = {t: kept for t, kept in self.kept.items() if t > safe}

    def total(self, t: int) -> Total | None:
        """The sum of update t over ranges, when all have it: the squared norm, the rows of the workers."""
        found = self.totals.get(t, {})
        if len(found) < len(self.ranges):
            return None
        return Total(square=sum(found[r.number].square for r in self.ranges), rows=found[0].rows)

    def has_values(self, t: int) -> bool:
        """Whether values of version t or later are there for every range."""
        return all(self.versions.get(r.number, -1) >= t for r in self.ranges)

    def read(self, flat: np.ndarray, moves: Mapping[int, np.ndarray] | None = None) -> int:
        """Write the values that came last into a flat array; return the oldest version among them. `moves` are added
        where the values do not have the update of that number."""
        for r in self.ranges:
            late = [move for t, move in (moves or {}).items() if t > self.versions[r.number]]
            r.put(flat, sum((r.take(move) for move in late), self.values[r.number]))
        return min(self.versions[r.number] for r in self.ranges)

    def state(self) -> dict[str, Any]:
        """For an error: by which map, with what values, waiting for which answers."""
        return {"epoch": self.map.epoch, "empty": self.map.empty, "versions": self.versions, "open": sorted(self.open)}

    def check(self) -> None:
        """Raise if the servers refused a message, or a range that was loaded is empty."""
        if self.refused is not None:
            raise ServersFailed(f"a server refused worker {self.worker}: {self.refused}", hint="see its log")
        lost = [number for number in self.map.empty if number in self.versions]
        if lost:
            raise ServersFailed(
                f"range {lost[0]} is lost: all servers that had it died before a copy was made",
                hint="go on from the last checkpoint with bagu train --resume",
            )
