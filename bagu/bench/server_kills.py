"""The record of kills: servers of real processes die by SIGKILL at random moments, and no update is lost or doubled.

Workers are threads of this process with known gradients: every weight is compared with the exact sum after every
update, so one that is lost, doubled or applied in part shows at once. A kill comes when all servers have their copies.
"""

import os
import random
import signal
import statistics
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bagu.parallel.server.client import Client
from bagu.parallel.server.group import SERVER, start_here
from bagu.parallel.server.keys import COPIES
from bagu.parallel.server.links import connect
from bagu.parallel.server.place import new_group
from bagu.parallel.server.wire import Message

SIZE = 1 << 16
SLOW = 10  # times the median update, for a worker that is slow


@dataclass
class Record:
    """`recovery_s` are the times from each kill to the next update that all workers completed."""

    kills: int = 0
    updates: int = 0
    wrong: int = 0
    recovery_s: list[float] = field(default_factory=list)
    longest_s: float = 0.0  # of one update
    pause_s: float = 0.0  # that a slow worker lets the others wait

    def row(self) -> dict[str, Any]:
        times = sorted(self.recovery_s) or [0.0]
        return {
            "kills": self.kills,
            "updates": self.updates,
            "wrong_updates": self.wrong,
            "recovery_median_s": statistics.median(times),
            "recovery_p95_s": times[int(0.95 * (len(times) - 1))],
            "recovery_max_s": times[-1],
            "longest_update_s": self.longest_s,
        }


class Servers:
    """A manager and servers as processes; those that die are started again, as by `bagu train --servers`."""

    def __init__(self, servers: int) -> None:
        self.place = new_group(servers)
        self.processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._status: dict[str, Any] = {}
        self._ended = False
        self._keep()
        threading.Thread(target=self._run, daemon=True).start()

    def _keep(self) -> None:
        for role, number in (("manager", 0), *(("server", n) for n in range(self.place.servers))):
            process = self.processes.get((role, number))
            if process is None or process.poll() is not None:
                started: Any = start_here(replace(self.place, role=role, number=number), SERVER)
                self.processes[role, number] = started

    def _run(self) -> None:
        link = None
        while not self._ended:
            self._keep()
            try:
                if link is None or link.ended:
                    hello = Message(kind="hello", more={"who": "watcher", "number": 0})
                    link = connect(self.place.manager, self.place.token, hello, self._take, lambda _: None)
                link.send(Message(kind="status"))
            except OSError:
                link = None
            time.sleep(0.02)

    def _take(self, _: object, m: Message) -> None:
        if m.kind == "status":
            self._status = dict(m.more)

    def whole(self) -> bool:
        """Whether all processes live, and by the heartbeats of these servers every range has all of its holders."""
        if any(process.poll() is not None for process in list(self.processes.values())):
            return False
        facts = dict(self._status.get("servers", []))
        pids = {n: p.pid for (role, n), p in self.processes.items() if role == "server"}
        held = min(COPIES + 1, self.place.servers)  # a server that is back reports the ranges that have come so far
        versions = {n: [v for v in facts[n].get("versions", {}).values() if v >= 0] for n in facts}
        return len(facts) == self.place.servers and all(
            facts[n].get("pid") == pids[n] and len(versions[n]) == held for n in facts
        )

    def state(self) -> str:
        """For an error: what the manager said last, and the processes."""
        processes = {f"{role} {n}": (p.pid, p.poll()) for (role, n), p in self.processes.items()}
        return f"map: {self._status}; processes (pid, exit status): {processes}"

    def close(self) -> None:
        self._ended = True
        for process in self.processes.values():
            process.kill()
            process.wait()


def strike(servers: Servers, how: str, rng: random.Random) -> None:
    """One fault: a server or two adjacent ones killed, a server stopped for a while, or the manager killed."""
    slot = rng.randrange(servers.place.servers)
    if how == "manager":
        servers.processes["manager", 0].kill()
    elif how == "stop":
        process = servers.processes["server", slot]
        os.kill(process.pid, signal.SIGSTOP)
        threading.Timer(5.0, os.kill, (process.pid, signal.SIGCONT)).start()
    else:
        slots = (slot, (slot + 1) % servers.place.servers)[: 2 if how == "pair" else 1]
        killed = [servers.processes["server", number] for number in slots]
        for process in killed:
            process.kill()
        for process in killed:  # one that has not ended yet is still in the status, with its copies: `whole` would hold
            process.wait()


class Workers:
    """Threads that push known gradients, each of which compares every weight with the exact sum after every update."""

    def __init__(self, number: int, servers: Servers, found: Record) -> None:
        self._servers, self._found = servers, found
        self.done = [0] * number  # updates, by worker
        self.pause_s = 0.0  # of worker 0 before each push
        self.times: deque[float] = deque(maxlen=50)  # of the last updates
        self._stop_at = 1 << 60
        self._lock, self._failures, self._clients = threading.Lock(), list[BaseException](), dict[int, Client]()
        self._threads = [threading.Thread(target=self._run, args=(w,), daemon=True) for w in range(number)]
        for thread in self._threads:
            thread.start()

    def _run(self, worker: int) -> None:
        place = self._servers.place
        client = Client(worker, [(0, SIZE)], place.servers, np.dtype(float), place.manager, place.token)
        self._clients[worker] = client
        try:
            client.wait_for_map()
            if worker == 0:
                rule = {"kind": "sgd", "servers": place.servers, "segments": [[0, SIZE, {"weight_decay": 0.0}]]}
                client.load(0, [np.zeros(SIZE)], rule, len(self.done), {"facts": {}})
            client.pull(0)
            self._update(worker, client)
        except BaseException as error:
            self._failures.append(error)
        finally:
            client.close()

    def _update(self, worker: int, client: Client) -> None:
        flat, sum_so_far, t = np.zeros(SIZE), 0.0, 0
        while t < self._stop_at:
            t, begun = t + 1, time.monotonic()
            if worker == 0:
                time.sleep(self.pause_s)
            client.push(t, np.full(SIZE, float((worker + 1) * (t % 7 + 1))), [0.0])
            client.total(t)
            client.commit(t, {"lr": 1.0, "scale": 1.0, "step": t, "facts": {}})
            client.read(flat)
            sum_so_far += sum((w + 1) * (t % 7 + 1) for w in range(len(self.done)))
            took = time.monotonic() - begun
            with self._lock:
                self._found.wrong += not bool((flat == -sum_so_far).all())
                self._found.longest_s = max(self._found.longest_s, took)
                self.times.append(took)
                self.done[worker] = t

    def wait(self, ready: Callable[[], bool], limit: float = 60.0) -> None:
        """Until `ready`; raises what a worker raised."""
        begun = time.monotonic()
        while not ready():
            if self._failures:
                raise self._failures[0]
            if time.monotonic() - begun > limit:
                sessions = {w: client.session.state() for w, client in self._clients.items()}
                raise TimeoutError(
                    f"nothing happened for {limit:.0f} s after kill {self._found.kills}: updates {self.done}, "
                    f"workers {sessions}; {self._servers.state()}"
                )
            time.sleep(0.002)

    def finish(self) -> int:
        """Five updates more; how many each worker completed in all."""
        self._stop_at = max(self.done) + 5
        for thread in self._threads:
            thread.join(60)
        if self._failures:
            raise self._failures[0]
        assert min(self.done) == max(self.done) == self._stop_at
        return self._stop_at


def record(
    kills: int,
    *,
    servers: int = 4,
    workers: int = 2,
    how: str = "kill",
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> Record:
    """Run updates until there were so many kills, and five updates more."""
    group, found, rng = Servers(servers), Record(), random.Random(seed)
    threads = Workers(workers, group, found)
    try:
        while found.kills < kills:
            threads.wait(lambda: group.whole() and min(threads.done) > 0)
            time.sleep(rng.expovariate(10))
            threads.wait(group.whole)  # also now: a server that was silent on a busy machine may have come back empty
            reached, struck = max(threads.done) + 1, time.monotonic()  # one that began before may still complete
            if how == "slow":  # worker 0 for a second
                threads.pause_s = found.pause_s = SLOW * statistics.median(threads.times)
                threading.Timer(1.0, setattr, (threads, "pause_s", 0.0)).start()
            else:
                strike(group, how, rng)
            found.kills += 1
            threads.wait(lambda reached=reached: min(threads.done) > reached)  # type: ignore[misc]
            found.recovery_s.append(time.monotonic() - struck)
            if how in ("stop", "slow"):
                time.sleep(5.5 if how == "stop" else 1.5)
            if found.kills % 10 == 0:
                say(f"{found.kills} of {kills}: {max(threads.done)} updates, {found.wrong} wrong")
        found.updates = threads.finish()
        return found
    finally:
        group.close()
