"""What runs in a process of a server and of the manager: the plain objects of node.py and membership.py on sockets."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from bagu.parallel.server.links import Link, Listener, connect
from bagu.parallel.server.membership import BEAT_S, SILENT_S, Manager, Map
from bagu.parallel.server.node import Address, Out, Server
from bagu.parallel.server.store import Update
from bagu.parallel.server.wire import Message

TICK_S = 0.02


class ManagerProcess:
    """Listens for servers, workers and watchers; tells all of them each new map, and watchers the state of things."""

    def __init__(self, servers: int, host: str, port: int, token: str) -> None:
        self._lock, self._links = threading.Lock(), set[Link]()
        self.manager = Manager(servers, now=time.monotonic())
        self.facts: dict[int, Mapping[str, Any]] = {}  # of servers, from their heartbeats
        self._clocks: dict[int, Mapping[str, Any]] = {}  # of workers
        self.listener = Listener(host, port, token, self._hello, self._message, self._ended)
        self.ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _hello(self, link: Link, m: Message) -> None:
        with self._lock:
            link.peer = (m.more["who"], m.more["number"])
            if link.peer[0] == "server":
                versions = {int(r): v for r, v in m.more["versions"].items()}
                address = (m.more["host"], m.more["port"])
                if not self.manager.join(link.peer[1], m.more["birth"], address, m.epoch, versions, time.monotonic()):
                    link.close()
                    return
                link.birth = m.more["birth"]  # type: ignore[attr-defined]
                self.facts[link.peer[1]] = {"versions": m.more["versions"]}  # not those of the one that it replaces
            self._links.add(link)
            if self.manager.map.holders:
                link.send(self._map())
            self._publish()

    def _message(self, link: Link, m: Message) -> None:
        with self._lock:
            if m.kind == "beat" and link.peer[0] == "server":
                versions = {int(r): v for r, v in m.more["versions"].items()}
                self.manager.beat(link.peer[1], link.birth, versions, time.monotonic())  # type: ignore[attr-defined]
                self.facts[link.peer[1]] = m.more
                link.send(Message(kind="beat"))
                self._publish()
            elif m.kind == "beat":
                self._clocks[link.peer[1]] = m.more
            elif m.kind == "delay":
                self.manager.set_delay(m.more["delay"])
                self._publish()
            elif m.kind == "status":
                link.send(Message(kind="status", more=self.status()))
            elif m.kind == "end":
                self.ended.set()

    def status(self) -> dict[str, Any]:
        """What `bagu watch` shows."""
        return {
            **self.manager.map.more(),
            "deaths": self.manager.deaths,
            "workers": list(self._clocks.items()),
            "servers": [[slot, self.facts.get(slot, {})] for slot in sorted(self.manager.members)],
        }

    def _ended(self, link: Link) -> None:
        with self._lock:
            self._links.discard(link)
            if link.peer[0] == "server":
                self.manager.leave(link.peer[1], link.birth)  # type: ignore[attr-defined]
                self._publish()

    def _map(self) -> Message:
        return Message(kind="map", epoch=self.manager.map.epoch, more=self.manager.map.more())

    def _publish(self) -> None:
        if self.manager.publish(time.monotonic()) is not None:
            for link in self._links:
                link.send(self._map())

    def close(self) -> None:
        self.ended.set()
        self.listener.close()
        with self._lock:
            for link in self._links:
                link.close()

    def _run(self) -> None:
        while not self.ended.wait(TICK_S):
            with self._lock:
                self._publish()


class ServerProcess:
    """A server on sockets: it listens to workers and other servers, and has a link to the manager.

    When the manager's map does not have this process (it was silent for too long, and is taken for dead), it forgets
    all that it has and joins again, empty.
    """

    def __init__(
        self,
        slot: int,
        servers: int,
        manager: tuple[str, int],
        token: str,
        make: Callable[[Mapping[str, Any], int], Update],
        *,
        host: str = "127.0.0.1",
    ) -> None:
        self.slot, self.servers, self.token, self._make = slot, servers, token, make
        self._manager_at, self._host = manager, host
        self._lock = threading.RLock()
        self._peers: dict[Address, Link] = {}
        self._links: list[Link] = []  # with those on which other servers send, and those that ended: for their bytes
        self._manager: Link | None = None
        self._last_message = time.monotonic()
        self._empty()
        self.listener = Listener(host, 0, token, self._hello, self._message, self._gone)
        self.ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _empty(self) -> None:
        self.birth = time.time_ns()
        self.server = Server(self.slot, self.servers, self._make)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _hello(self, link: Link, m: Message) -> None:
        link.peer = (m.more["who"], m.more["number"])
        with self._lock:
            self._links.append(link)
            if link.peer[0] != "server":
                self._peers[link.peer] = link

    def _message(self, link: Link, m: Message) -> None:
        with self._lock:
            before = self.server.versions
            self._send(self.server.handle(link.peer, m), link)
            if any(before[r] < 0 <= v for r, v in self.server.versions.items()):
                self._beat()

    def _gone(self, link: Link) -> None:
        with self._lock:
            if self._peers.get(link.peer) is link:
                del self._peers[link.peer]

    def _send(self, out: list[Out], back: Link | None = None) -> None:
        for to, m in out:
            link = back if back is not None and back.peer == to and to[0] != "server" else self._peer(to)
            if link is not None:
                link.send(m)

    def _peer(self, to: Address) -> Link | None:
        """The link to another process; one to a server is made when it is first needed."""
        found = self._peers.get(to)
        if found is not None or to[0] != "server":
            return found
        address = self.server.map.addresses.get(to[1])
        if address is None:
            return None
        hello = Message(kind="hello", more={"who": "server", "number": self.slot})
        try:
            link = connect(address, self.token, hello, self._message, self._gone)
        except OSError:
            return None
        link.peer = to
        self._peers[to] = link
        self._links.append(link)
        return link

    # --- the manager --------------------------------------------------------------------------------------------------

    def _from_manager(self, link: Link, m: Message) -> None:
        with self._lock:
            if self._manager is not link:
                return
            self._last_message = time.monotonic()
            self.server.awake = True
            if m.kind == "map":
                self._take(Map.read(m.more))

    def _take(self, map: Map) -> None:
        if map.births.get(self.slot) != self.birth:
            if map.epoch > self.server.map.epoch and self.server.map.epoch > 0:  # taken for dead
                self._empty()
                self._leave()
            return
        for to, link in list(self._peers.items()):
            if to[0] == "server" and self.server.map.births.get(to[1]) != map.births.get(to[1]):
                link.close()
                del self._peers[to]
        self._send(self.server.set_map(map))

    def _leave(self) -> None:
        if self._manager is not None:
            self._manager.close()
        self._manager = None

    def _manager_gone(self, link: Link) -> None:
        with self._lock:
            if self._manager is link:
                self._manager = None

    def _join(self) -> None:
        versions = {str(r): v for r, v in self.server.versions.items()}
        more = {
            "who": "server",
            "number": self.slot,
            "birth": self.birth,
            "versions": versions,
            "host": self.listener.address[0],
            "port": self.listener.address[1],
        }
        hello = Message(kind="hello", epoch=self.server.map.epoch, more=more)
        try:
            self._manager = connect(self._manager_at, self.token, hello, self._from_manager, self._manager_gone)
        except OSError:  # it is being started again
            self._manager = None

    def _beat(self) -> None:
        if self._manager is not None:
            more = {
                "versions": {str(r): v for r, v in self.server.versions.items()},
                "pid": os.getpid(),
                "sent": sum(link.bytes_sent for link in self._links),
                "received": sum(link.bytes_received for link in self._links),
            }
            self._manager.send(Message(kind="beat", more=more))

    def close(self) -> None:
        self.ended.set()
        self.listener.close()
        with self._lock:
            self._leave()
            for link in self._peers.values():
                link.close()

    def _run(self) -> None:
        parent = os.getppid()
        while not self.ended.wait(BEAT_S):
            with self._lock:
                if time.monotonic() - self._last_message > SILENT_S:
                    self.server.awake = False
                if self._manager is None:
                    self._join()
                self._beat()
                self._send(self.server.tick())
            if os.getppid() != parent:  # the launcher was killed: do not stay behind
                os._exit(1)
