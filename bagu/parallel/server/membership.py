"""Who has what: the map of ranges to servers, its epoch, and the manager that makes it.

The manager stores only who is there. It receives births, deaths and heartbeats, and publishes a map with
a higher epoch whenever the holders of a range change. A manager that was started again learns all of it from the
servers, and continues above the highest epoch that one of them knows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bagu.parallel.server.keys import holders

SILENT_S = 1.0  # without a heartbeat: the server is taken for dead
LAST_SILENT_S = 30.0  # the same for one that alone has a range: no other could serve it, and it would come back empty
BEAT_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Map:
    """`holders[r]` are the servers of range r; the first one serves it. `empty` ranges have none with their values."""

    epoch: int = 0
    holders: tuple[tuple[int, ...], ...] = ()
    empty: tuple[int, ...] = ()
    addresses: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    births: Mapping[int, int] = field(default_factory=dict)  # of a server: which of the processes in its place
    delay: int | None = None  # set while the run runs; None: as it began

    def more(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "holders": self.holders,
            "empty": self.empty,
            "delay": self.delay,
            "addresses": [[slot, *place] for slot, place in self.addresses.items()],
            "births": [[slot, birth] for slot, birth in self.births.items()],
        }

    @classmethod
    def read(cls, more: Mapping[str, Any]) -> "Map":
        return cls(
            epoch=more["epoch"],
            holders=tuple(tuple(h) for h in more["holders"]),
            empty=tuple(more["empty"]),
            addresses={slot: (host, port) for slot, host, port in more["addresses"]},
            births=dict(more["births"]),
            delay=more["delay"],
        )


@dataclass(kw_only=True)
class Member:
    """A server that lives, as far as the manager knows."""

    birth: int
    address: tuple[str, int]
    versions: dict[int, int]  # by range, -1: empty
    seen: float


class Manager:
    """`now` is passed in: the manager has no clock. The first map appears when all servers have joined, or, after the
    manager was started again, when the others had `SILENT_S` to come."""

    def __init__(self, servers: int, *, now: float = 0.0) -> None:
        self.servers, self.members = servers, dict[int, Member]()
        self.map, self._started = Map(), now
        self.deaths, self._new_delay = 0, False
        self._published = now  # the last call of publish()

    def join(
        self, slot: int, birth: int, address: tuple[str, int], epoch: int, versions: Mapping[int, int], now: float
    ) -> bool:
        """A server says hello, also to a manager that is new. False: a younger process has its place."""
        old = self.members.get(slot)
        if not 0 <= slot < self.servers or (old is not None and old.birth > birth):
            return False
        if old is not None and old.birth != birth:
            self.leave(slot, old.birth)
        self.members[slot] = Member(birth=birth, address=address, versions=dict(versions), seen=now)
        if epoch > self.map.epoch:
            self.map = Map(epoch=epoch, delay=self.map.delay)
        return True

    def leave(self, slot: int, birth: int) -> None:
        """A server's connection has ended."""
        if (member := self.members.get(slot)) is not None and member.birth == birth:
            del self.members[slot]
            self.deaths += 1

    def beat(self, slot: int, birth: int, versions: Mapping[int, int], now: float) -> None:
        if (member := self.members.get(slot)) is not None and member.birth == birth:
            member.versions, member.seen = dict(versions), now

    def set_delay(self, delay: int) -> None:
        """Bound the delay anew; workers learn it with the next map."""
        self.map, self._new_delay = replace(self.map, delay=delay), True

    def publish(self, now: float) -> Map | None:
        """The map, if it changed since the last call. To be called more often than `BEAT_S`."""
        self._drop_silent(now)
        if (
            not self.map.holders
            and len(self.members) < self.servers
            and (
                now - self._started < 2 * SILENT_S
                or not any(v >= 0 for m in self.members.values() for v in m.versions.values())
            )
        ):
            return None
        found = [self._holders(number) for number in range(self.servers)]
        births = {slot: member.birth for slot, member in self.members.items()}
        empty = tuple(
            number for number, slots in enumerate(found) if not any(self._has(slot, number) for slot in slots)
        )
        same = tuple(found) == self.map.holders and births == self.map.births and empty == self.map.empty
        if same and not self._new_delay:
            return None
        self._new_delay = False
        addresses = {slot: member.address for slot, member in self.members.items()}
        self.map = Map(
            epoch=self.map.epoch + 1,
            holders=tuple(found),
            empty=empty,
            addresses=addresses,
            births=births,
            delay=self.map.delay,
        )
        return self.map

    def _drop_silent(self, now: float) -> None:
        late, self._published = now - self._published, now
        if late > BEAT_S:  # this process did not run: heartbeats that came meanwhile are not read yet
            for member in self.members.values():
                member.seen = min(now, member.seen + late)
        alive = {slot for slot, member in self.members.items() if now - member.seen <= SILENT_S}
        for slot, member in list(self.members.items()):
            last = any(
                self._has(slot, number) and not any(self._has(other, number) for other in alive - {slot})
                for number in member.versions
            )
            if now - member.seen > (LAST_SILENT_S if last else SILENT_S):
                self.leave(slot, member.birth)

    def _has(self, slot: int, number: int) -> bool:
        return self.members[slot].versions.get(number, -1) >= 0

    def _holders(self, number: int) -> tuple[int, ...]:
        """The living holders of a range, those with its values first, in the order of the ring."""
        living = [slot for slot in holders(number, self.servers) if slot in self.members]
        return tuple(sorted(living, key=lambda slot: not self._has(slot, number)))


def primaries(map: Map, slot: int) -> Sequence[int]:
    """The ranges that a server serves."""
    return [number for number, slots in enumerate(map.holders) if slots and slots[0] == slot]
