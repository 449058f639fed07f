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
from bagu.parallel.server.group import COMMANDS, start_here
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
            "kills": self.kills, "updates": self.updates, "wrong_updates": self.wrong,
            "recovery_median_s": statistics.median(times), "recovery_p95_s": times[int(0.95 * (len(times) - 1))],
            "recovery_max_s": times[-1], "longest_update_s": self.longest_s,
        }  # fmt: skip


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
                command = COMMANDS["manager" if role == "manager" else "plain server"]
                started: Any = start_here(replace(self.place, role=role, number=number), command)
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
    done, stop_at, pause = [0] * workers, [1 << 60], [0.0]
    times: deque[float] = deque(maxlen=50)  # of the last updates
    lock, failures, clients = threading.Lock(), list[BaseException](), dict[int, Client]()

    def work(worker: int) -> None:
        client = Client(worker, [(0, SIZE)], servers, np.dtype(float), group.place.manager, group.place.token)
        clients[worker] = client
        try:
            client.wait_for_map()
            if worker == 0:
                client.load(0, [np.zeros(SIZE)], {"kind": "descend"}, workers, {"facts": {}})
            client.pull(0)
            flat, sum_so_far, t = np.zeros(SIZE), 0.0, 0
            while t < stop_at[0]:
                t, begun = t + 1, time.monotonic()
                if worker == 0:
                    time.sleep(pause[0])
                client.push(t, np.full(SIZE, float((worker + 1) * (t % 7 + 1))), [0.0])
                client.total(t)
                client.commit(t, {"lr": 1.0, "facts": {}})
                client.read(flat)
                sum_so_far += sum((w + 1) * (t % 7 + 1) for w in range(workers))
                now = time.monotonic()
                with lock:
                    found.wrong += not bool((flat == -sum_so_far).all())
                    found.longest_s = max(found.longest_s, now - begun)
                    times.append(now - begun)
                    done[worker] = t
        except BaseException as error:
            failures.append(error)
        finally:
            client.close()

    def wait(ready: Callable[[], bool], limit: float = 60.0) -> None:
        """Until `ready`; raises what a worker raised."""
        begun = time.monotonic()
        while not ready():
            if failures:
                raise failures[0]
            if time.monotonic() - begun > limit:
                sessions = {w: client.session.state() for w, client in clients.items()}
                raise TimeoutError(
                    f"nothing happened for {limit:.0f} s after kill {found.kills}: updates {done}, workers {sessions}; "
                    f"{group.state()}"
                )
            time.sleep(0.002)

    threads = [threading.Thread(target=work, args=(w,), daemon=True) for w in range(workers)]
    for thread in threads:
        thread.start()
    try:
        while found.kills < kills:
            wait(lambda: group.whole() and min(done) > 0)
            time.sleep(rng.expovariate(10))
            wait(group.whole)  # also now: on a busy machine a server may have been silent, and have come back empty
            reached, struck = max(done) + 1, time.monotonic()  # one that began before the kill may still complete
            if how == "slow":  # worker 0 for a second
                pause[0] = found.pause_s = SLOW * statistics.median(times)
                threading.Timer(1.0, pause.__setitem__, (0, 0.0)).start()
            else:
                strike(group, how, rng)
            found.kills += 1
            wait(lambda reached=reached: min(done) > reached)  # type: ignore[misc]
            found.recovery_s.append(time.monotonic() - struck)
            if how in ("stop", "slow"):
                time.sleep(5.5 if how == "stop" else 1.5)
            if found.kills % 10 == 0:
                say(f"{found.kills} of {kills}: {max(done)} updates, {found.wrong} wrong")
        stop_at[0] = max(done) + 5
        for thread in threads:
            thread.join(60)
        found.updates = min(done)
        if failures:
            raise failures[0]
        assert min(done) == max(done) == stop_at[0]
        return found
    finally:
        group.close()
