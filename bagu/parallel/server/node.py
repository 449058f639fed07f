"""A server, as a function from a message to messages: no clock, no socket, no Ray.

    push    worker → first holder    (worker, t), a gradient. Answered by `total` when the sum is complete
    commit  worker → first holder    the decision about update t. Applied once, then:
    copy    first holder → others    the summed gradient (replication after aggregation: W pushes, one copy)
    ack     other → first holder     its version. When all living holders have update t, workers get `values`
    ask     first holder → others    which version do you have? Sent after each new map, and when acks are missing
    state   holder → holder          the whole range, to one that is too far behind, or was just born
    load    worker 0 → first holder  the first state of a run, or one to go back to, as update t
    pull    anyone → first holder    the values from version t on

A message by an older map is refused, with the newer map; one by a newer map than this server's waits for that map. A
server that slept through its own death has an old epoch: no holder acknowledges its copies, so it answers no commit.
After each new map a first holder serves only when all other holders have sent their versions; if one is ahead (its
first holder died before telling all), it takes that state first. So no update that a worker knows of is lost.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bagu.errors import ArgumentError
from bagu.parallel.server.keys import holders
from bagu.parallel.server.membership import Map, primaries
from bagu.parallel.server.store import Applied, Spec, Store, Total, Update
from bagu.parallel.server.wire import Message

Address = tuple[str, int]  # ("worker", 1) or ("server", 3)
Out = tuple[Address, Message]
LOG = 8  # updates that are sent again one by one; a holder that is further behind gets the whole state


@dataclass(kw_only=True)
class _Served:
    """A range that this server serves: what the other holders have, and which workers wait."""

    acked: dict[int, int] = field(default_factory=dict)  # by server: its version
    log: dict[int, Applied] = field(default_factory=dict)  # the last updates
    summing: dict[int, set[Address]] = field(default_factory=dict)  # t: who waits for the total
    reading: dict[int, set[tuple[Address, bool]]] = field(default_factory=dict)  # t: who waits for values, or the whole
    held: dict[tuple[object, ...], Out] = field(default_factory=dict)  # requests from before all holders have answered


class Server:
    """The server in place `slot` of `servers`. `make(rule, range)` returns the update of a range."""

    def __init__(self, slot: int, servers: int, make: Callable[[Mapping[str, Any], int], Update]) -> None:
        self.slot, self.servers = slot, servers
        self.map = Map()
        self.stores = {n: Store(make, n) for n in range(servers) if slot in holders(n, servers)}
        self._serves: dict[int, _Served] = {}
        self._early: dict[tuple[object, ...], Out] = {}  # messages by a map that is still on its way here
        self.awake = True  # False: the manager has not answered for a while, and others may have taken over

    @property
    def versions(self) -> dict[int, int]:
        return {number: store.version for number, store in self.stores.items()}

    def set_map(self, map: Map) -> list[Out]:
        """Act by a newer map: ask the other holders of the ranges that this server serves now."""
        if map.epoch <= self.map.epoch:
            return []
        self.map = map
        before, self._serves = self._serves, {}
        for number in primaries(map, self.slot):
            log = before[number].log if number in before else {}
            self._serves[number] = _Served(log=log)
        early, self._early = self._early, {}
        return [*self.tick(), *(out for sender, m in early.values() for out in self.handle(sender, m))]

    def tick(self) -> list[Out]:
        """Ask the holders whose acknowledgement is missing, and answer pulls that came while the manager was silent.
        Called after a new map and from time to time."""
        asks = [
            (("server", slot), Message(kind="ask", epoch=self.map.epoch, range=number))
            for number, served in self._serves.items()
            for slot in self.map.holders[number][1:]
            if served.acked.get(slot) != self.stores[number].version  # also one that is ahead: its state may be lost
        ]
        return [*asks, *(out for number in self._serves for out in self._release(number))]

    def handle(self, sender: Address, m: Message) -> list[Out]:
        """The messages that follow from one."""
        if m.epoch < self.map.epoch:
            return [(sender, Message(kind="map", epoch=self.map.epoch, more=self.map.more()))]
        if m.epoch > self.map.epoch:
            self._early[sender, m.kind, m.range, m.t] = (sender, m)
            return []
        if m.range not in self.stores:
            return []
        if m.kind in ("copy", "ask", "state", "ack", "want"):
            return getattr(self, f"_{m.kind}")(sender, m)
        if m.range not in self._serves or m.kind not in ("push", "commit", "load", "pull"):
            return []
        if not self._ready(m.range) or (m.kind == "pull" and not self.awake):
            self._serves[m.range].held[sender, m.kind, m.t] = (sender, m)
            return []
        return getattr(self, f"_{m.kind}")(sender, m)

    def _release(self, number: int) -> list[Out]:
        """Handle the requests that came before this server was ready to serve the range."""
        served = self._serves[number]
        if not self._ready(number):
            return []
        held, served.held = served.held, {}
        return [out for sender, m in held.values() for out in self.handle(sender, m)]

    # --- from workers -------------------------------------------------------------------------------------------------

    def _ready(self, number: int) -> bool:
        """Whether every other holder has sent its version, and none is ahead."""
        acked, version = self._serves[number].acked, self.stores[number].version
        return all(slot in acked and acked[slot] <= version for slot in self.map.holders[number][1:])

    def _push(self, sender: Address, m: Message) -> list[Out]:
        store, served = self.stores[m.range], self._serves[m.range]
        if store.spec is None:
            return []
        if m.more["layout"] != store.spec.layout:
            keys = f"the keys of worker {m.worker} are {m.more['layout']}, those of the servers {store.spec.layout}"
            return [(sender, _refusal(m, keys))]
        served.summing.setdefault(m.t, set()).add(sender)
        try:
            store.push(m.worker, m.t, m.data, m.more["method"], m.more["row"])
        except ArgumentError as error:
            return [(sender, _refusal(m, str(error)))]
        return [*self._totals(m.range), *self._advance(m.range)]

    def _totals(self, number: int) -> list[Out]:
        store, served = self.stores[number], self._serves[number]
        out = []
        for t in [t for t in served.summing if t in store.totals]:
            total = Message(kind="total", epoch=self.map.epoch, range=number, t=t, more=store.totals[t].more())
            out += [(who, total) for who in sorted(served.summing.pop(t))]
        return out

    def _commit(self, sender: Address, m: Message) -> list[Out]:
        self.stores[m.range].decide(m.t, m.more["decision"])
        if m.more.get("pull", True):
            self._serves[m.range].reading.setdefault(m.t, set()).add((sender, bool(m.more.get("whole"))))
        return [*self._advance(m.range), *self._values(m.range)]

    def _load(self, sender: Address, m: Message) -> list[Out]:
        store, served = self.stores[m.range], self._serves[m.range]
        store.install(m.t, Spec(**m.more["spec"]), m.data, m.more)
        served.log.clear()
        served.reading.setdefault(m.t, set()).add((sender, False))
        return [*self.tick(), *self._values(m.range)]

    def _pull(self, sender: Address, m: Message) -> list[Out]:
        self._serves[m.range].reading.setdefault(m.t, set()).add((sender, bool(m.more.get("whole"))))
        return self._values(m.range)

    def _advance(self, number: int) -> list[Out]:
        """Apply what can be applied, and send it to the other holders."""
        served, out = self._serves[number], list[Out]()
        for t, applied in self.stores[number].advance():
            served.log[t] = applied
            served.log.pop(t - LOG, None)
            out += [(("server", slot), self._copy_of(number, t)) for slot in self.map.holders[number][1:]]
        return [*out, *self._values(number)] if out or not self.map.holders[number][1:] else []

    def _values(self, number: int) -> list[Out]:
        """The values, for workers that wait for a version that all holders have."""
        store, served = self.stores[number], self._serves[number]
        if any(served.acked.get(slot, -1) < store.version for slot in self.map.holders[number][1:]):
            return []  # values that not all holders have could be lost after a worker has seen them
        ready = [t for t in served.reading if t <= store.version]
        if not ready or store.spec is None:
            return []
        more = {"decision": store.decision, "size": store.spec.size, "layout": store.spec.layout}
        head: Any = {"epoch": self.map.epoch, "range": number, "t": store.version, "more": more}
        wanted = sorted({wish for t in ready for wish in served.reading.pop(t)})
        whole = Message(kind="memory", data=store.memory.copy(), **head) if any(w for _, w in wanted) else None
        values = Message(kind="values", data=store.values.copy(), **head) if not all(w for _, w in wanted) else None
        return [(who, whole if want else values) for who, want in wanted]  # type: ignore[misc]

    # --- between holders ----------------------------------------------------------------------------------------------

    def _copy_of(self, number: int, t: int) -> Message:
        applied = self._serves[number].log[t]
        more = {"decision": applied.decision, "total": applied.total.more()}
        none = applied.gradient is None
        data = {} if none else {"data": applied.gradient}
        return Message(kind="copy", epoch=self.map.epoch, range=number, t=t, more=more, **data)  # type: ignore[arg-type]

    def _copy(self, sender: Address, m: Message) -> list[Out]:
        store = self.stores[m.range]
        if m.t == store.version + 1 and store.spec is not None:
            decision = m.more["decision"]
            gradient = None if decision.get("skip") else m.data.view(store.spec.dtype)
            store.apply(m.t, Applied(decision=decision, total=Total(**m.more["total"]), gradient=gradient))
        return [(sender, self._own_version(m.range, behind=store.version < m.t))]

    def _own_version(self, number: int, *, behind: bool) -> Message:
        version = self.stores[number].version
        return Message(kind="ack", epoch=self.map.epoch, range=number, t=version, more={"behind": behind})

    def _ask(self, sender: Address, m: Message) -> list[Out]:
        return [(sender, self._own_version(m.range, behind=True))]

    def _state(self, sender: Address, m: Message) -> list[Out]:
        self.stores[m.range].install(m.t, Spec(**m.more["spec"]), m.data, m.more)
        if m.range in self._serves:  # it was behind a holder of copies
            self._serves[m.range].log.clear()
            return [*self.tick(), *self._release(m.range)]
        return self._ask(sender, m)

    def _want(self, sender: Address, m: Message) -> list[Out]:
        return [(sender, self._whole(m.range))]

    def _whole(self, number: int) -> Message:
        store = self.stores[number]
        return Message(
            kind="state",
            epoch=self.map.epoch,
            range=number,
            t=store.version,
            more=store.state(),
            data=store.memory.copy(),
        )

    def _ack(self, sender: Address, m: Message) -> list[Out]:
        if m.range not in self._serves:
            return []
        store, served = self.stores[m.range], self._serves[m.range]
        served.acked[sender[1]] = max(m.t, served.acked.get(sender[1], -1))
        if m.t > store.version:
            return [(sender, Message(kind="want", epoch=self.map.epoch, range=m.range))]
        again = list[Out]()
        if m.t < store.version and m.more["behind"]:  # not only because later copies are on their way
            missing = range(m.t + 1, store.version + 1)
            known = all(t in served.log for t in missing)
            again = [
                (sender, copy)
                for copy in ([self._copy_of(m.range, t) for t in missing] if known else [self._whole(m.range)])
            ]
        return [*again, *self._values(m.range), *self._release(m.range)]


def _refusal(m: Message, reason: str) -> Message:
    return Message(kind="refused", epoch=m.epoch, range=m.range, t=m.t, more={"reason": reason})


def as_sent(messages: Iterable[Out]) -> list[Out]:
    """The messages with copies of their arrays, as a socket would deliver them."""
    return [(to, replace(m, data=np.array(m.payload(), np.uint8))) for to, m in messages]
