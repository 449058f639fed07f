"""Servers, workers and a manager as plain objects over a network that drops, delays, doubles and reorders."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from bagu.parallel.server.keys import ranges_of
from bagu.parallel.server.membership import Manager, Map
from bagu.parallel.server.node import Address, Out, Server, as_sent
from bagu.parallel.server.session import Session
from bagu.parallel.server.store import Update
from bagu.parallel.server.wire import Message

SEGMENTS = [(0, 192), (192, 448)]
SIZE = 448


def make(rule: Mapping[str, Any], number: int) -> Update:
    """values ← 0.5 values + g t, state ← state + g: a lost, doubled or swapped update shows in the values."""

    def update(memory: np.ndarray, gradient: np.ndarray, decision: Mapping[str, Any]) -> None:
        memory[0] = 0.5 * memory[0] + gradient * decision["step"]
        memory[1] += gradient

    return update


def gradient(worker: int, t: int) -> np.ndarray:
    return np.random.default_rng([worker, t]).standard_normal(SIZE)


def expected(workers: int, updates: int) -> np.ndarray:
    """The values after so many updates, by a loop."""
    values = np.arange(SIZE, dtype=float)
    for t in range(1, updates + 1):
        values = 0.5 * values + sum(gradient(w, t) for w in range(workers)) * t
    return values


class Worker:
    """Pushes `updates` updates, at most `delay` ahead of the last one that is decided."""

    def __init__(self, number: int, workers: int, servers: int, updates: int, delay: int = 0) -> None:
        self.session = Session(number, ranges_of(SEGMENTS, servers), np.dtype(np.float64))
        self.number, self.workers, self.updates, self.delay = number, workers, updates, delay
        self.pushed = self.decided = self.loaded = 0
        self.norms: list[float] = []
        self.ages: list[int] = []

    @property
    def done(self) -> bool:
        return self.decided == self.updates and self.session.has_values(self.updates)

    def go(self) -> list[Out]:
        """What can be sent now."""
        session = self.session
        if not self.loaded:
            if not session.map.holders:
                return []
            self.loaded = 1
            if self.number == 0:
                rows = [np.arange(SIZE, dtype=float), np.zeros(SIZE)]
                return session.load(0, rows, {"kind": "test"}, self.workers, {})
            return session.pull(0)
        out: list[Out] = []
        if self.decided < self.pushed and (total := session.total(self.decided + 1)) is not None:
            self.decided += 1
            assert [row[0] for row in total.rows] == list(range(self.workers))
            self.norms.append(total.square)
            out += session.commit(self.decided, {"step": self.decided, "facts": {"step": self.decided}})
        ready = session.has_values(max(0, self.pushed - self.delay))
        if self.pushed < self.updates and self.pushed - self.decided <= self.delay and ready:
            self.ages.append(self.pushed - min(session.versions.values()))
            self.pushed += 1
            out += session.push(self.pushed, gradient(self.number, self.pushed), [float(self.number)])
        return out


class Cluster:
    """All of them. `flight` are the messages on their way."""

    def __init__(self, servers: int, workers: int, updates: int, delay: int = 0) -> None:
        self.servers = {slot: Server(slot, servers, make) for slot in range(servers)}
        self.births = dict.fromkeys(range(servers), 1)
        self.workers = [Worker(w, workers, servers, updates, delay) for w in range(workers)]
        self.manager, self.count = Manager(servers), servers
        self.asleep: set[int] = set()
        self.bytes: dict[str, int] = {}  # of payloads, by kind
        self.flight: list[tuple[Address, Address, Message]] = []  # from, to, what
        for slot in self.servers:
            self.manager.join(slot, 1, ("", 0), 0, {}, 0.0)
        self.told: Map | None = None
        self.publish()

    def send(self, sender: Address, out: list[Out]) -> None:
        for to, m in as_sent(out):
            self.flight.append((sender, to, m))
            self.bytes[m.kind] = self.bytes.get(m.kind, 0) + len(m.data)

    def publish(self) -> None:
        """Heartbeats, then the map to all."""
        for slot, server in self.servers.items():
            if slot not in self.asleep:
                self.manager.beat(slot, self.births[slot], server.versions, 0.0)
        if (map := self.manager.publish(0.0)) is not None:
            self.told = map
            for name in (*(("server", s) for s in self.servers), *(("worker", w.number) for w in self.workers)):
                self.flight.append((("manager", 0), name, Message(kind="map", epoch=map.epoch, more=map.more())))

    def deliver(self, at: int, *, keep: bool = False) -> None:
        sender, to, m = self.flight[at] if keep else self.flight.pop(at)
        kind, number = to
        if kind == "worker":
            self.send(to, self.workers[number].session.handle(sender, m))
            self.send(to, self.workers[number].go())
        elif number in self.servers and number not in self.asleep:
            server = self.servers[number]
            if m.kind == "map":
                map = Map.read(m.more)
                if map.births.get(number) == self.births[number]:
                    self.send(to, server.set_map(map))
            elif sender[0] != "server" or sender[1] in self.servers:
                self.send(to, server.handle(sender, m))

    def kill(self, slot: int) -> None:
        self.servers.pop(slot, None)
        self.manager.leave(slot, self.births[slot])
        self.publish()

    def sleep(self, slot: int) -> None:
        """SIGSTOP: others take it for dead. It keeps what it had."""
        self.asleep.add(slot)
        self.manager.leave(slot, self.births[slot])
        self.publish()

    def wake(self, slot: int) -> None:
        """SIGCONT: it handles what was waiting for it by its old map, before it hears of another."""
        self.asleep.discard(slot)

    def birth(self, slot: int) -> None:
        self.births[slot] += 1
        self.servers[slot] = Server(slot, self.count, make)
        self.manager.join(slot, self.births[slot], ("", 0), 0, {}, 0.0)
        self.publish()

    def timers(self) -> None:
        """What clocks do in a process: send again, ask again, beat."""
        for worker in self.workers:
            self.send(("worker", worker.number), worker.go())
            self.send(("worker", worker.number), worker.session.again())
            if self.told is not None:
                self.send(("worker", worker.number), worker.session.set_map(self.told))
        for slot, server in self.servers.items():
            if slot not in self.asleep:
                if self.told is not None and self.told.births.get(slot) == self.births[slot]:
                    self.send(("server", slot), server.set_map(self.told))
                self.send(("server", slot), server.tick())
        self.publish()

    def run(self, rng: random.Random, *, drop: float = 0.0, double: float = 0.0, limit: int = 20000) -> None:
        """Deliver at random until all workers are done."""
        for _ in range(limit):
            if all(w.done for w in self.workers):
                return
            if not self.flight or rng.random() < 0.002:
                self.timers()
            if self.flight:
                at, luck = rng.randrange(len(self.flight)), rng.random()
                if luck < drop:
                    self.flight.pop(at)
                else:
                    self.deliver(at, keep=luck < drop + double)
        raise AssertionError(f"not done: {[(w.pushed, w.decided) for w in self.workers]}")

    def values(self) -> np.ndarray:
        flat = np.zeros(SIZE)
        self.workers[0].session.read(flat)
        return flat
