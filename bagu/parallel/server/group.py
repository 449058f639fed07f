"""The processes of a run with a parameter server: start them, start again those that die, end all with the last worker.

A server or the manager that dies is started again in its place; a server comes back empty and gets copies. A worker
that is killed is started again and continues from the servers; one that ends with an error ends the run.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bagu.parallel.server.place import Place
from bagu.parallel.supervise import SAME_SIGNAL_S, STOPPED
from bagu.parallel.unlike.workers import Cores

POLL_S = 0.05
MOST_DEATHS = 1000  # of servers, in one run: more is a fault of the machine
GRACE_S = 5.0


class Process(Protocol):
    """A process on this machine or on another one."""

    def poll(self) -> int | None: ...
    def send_signal(self, sig: int, /) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[Place, Sequence[str]], Process]  # a place, and the command that runs there


def start_here(place: Place, command: Sequence[str], cores: Cores | None = None) -> Process:
    """A process on this machine, in a group of its own: Ctrl-C reaches the launcher, which passes it on once."""
    cores = cores or Cores(threads=1)
    process = subprocess.Popen(list(command), env=cores.environ() | place.environ(), start_new_session=True)
    cores.pin(process.pid)
    return process


SERVER = [sys.executable, "-m", "bagu.parallel.server"]  # the command of a server, and of the manager


@dataclass(kw_only=True)
class _Member:
    place: Place
    command: Sequence[str]
    process: Process
    deaths: int = 0

    @property
    def name(self) -> str:
        return self.place.role if self.place.role == "manager" else f"{self.place.role} {self.place.number}"


class Group:
    """The manager, the servers and the workers of a run. `worker(again)` is the command of a worker."""

    def __init__(
        self,
        place: Place,
        workers: int,
        worker: Callable[[int, bool], Sequence[str]],
        say: Callable[[str], None],
        *,
        start: Start = start_here,
        max_restarts: int = 3,
    ) -> None:
        self._start, self._say, self._worker, self._restarts = start, say, worker, max_restarts
        self.members = [self._member(place, SERVER)]
        for slot in range(place.servers):
            self.members.append(self._member(replace(place, role="server", number=slot), SERVER))
        for number in range(workers):
            self.members.append(self._member(replace(place, role="worker", number=number), worker(number, False)))
        self._passed_on, self._passed_at = 0, 0.0

    def _member(self, place: Place, command: Sequence[str]) -> _Member:
        return _Member(place=place, command=command, process=self._start(place, command))

    @property
    def workers(self) -> list[_Member]:
        return [member for member in self.members if member.place.role == "worker"]

    def run(self, poll: Callable[[], None] = lambda: None) -> int:
        """Until the workers have ended; their exit status. `poll` is called again and again."""
        before = {s: signal.signal(s, self._pass_on) for s in (signal.SIGINT, signal.SIGTERM)}
        failed: tuple[float, int] | None = None
        try:
            while any(worker.process.poll() is None for worker in self.workers):
                for member in self.members:
                    status = member.process.poll()
                    saved = status == STOPPED and self._passed_on < 2  # the second signal ends a worker at once
                    if member.place.role == "worker" and (status in (None, 0) or saved):
                        continue
                    if status is not None and failed is None and not self._again(member, status):
                        failed = (time.monotonic(), abs(status) or 1)
                if failed is not None and time.monotonic() - failed[0] > GRACE_S:
                    break
                poll()
                time.sleep(POLL_S)
            codes = [worker.process.poll() or 0 for worker in self.workers]
            return failed[1] if failed is not None else max(codes)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.end()

    def _again(self, member: _Member, status: int) -> bool:
        """Start a member again; False if it must not be."""
        n = member.deaths = member.deaths + 1
        worker = member.place.role == "worker"
        if (
            self._passed_on
            or (worker and (status > 0 or member.deaths > self._restarts))
            or member.deaths > MOST_DEATHS
        ):
            if worker:
                how = f"ended with status {status}" if status > 0 else "was killed" + f" {n} times" * (n > 1)
                self._say(f"{member.name} {how}")
            return False
        self._say(
            f"{member.name} has died: started again"
            + (", empty; copies serve its range" if member.place.role == "server" else "")
        )
        if worker:
            member.command = self._worker(member.place.number, True)
        member.process = self._start(member.place, member.command)
        return True

    def _pass_on(self, number: int, _: object) -> None:
        if time.monotonic() - self._passed_at >= SAME_SIGNAL_S:
            self._passed_on, self._passed_at = self._passed_on + 1, time.monotonic()
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.send_signal(number)

    def end(self) -> None:
        for member in self.members:
            if member.process.poll() is None:
                member.process.kill()
        for member in self.members:
            if isinstance(member.process, subprocess.Popen):
                member.process.wait()
