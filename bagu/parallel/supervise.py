"""`bagu train --nproc N`: start the ranks of this machine, watch them, and start them again after a crash.

Ranks that are killed by a signal (out of memory, a fault of the machine, the watchdog) are started again from the last
checkpoint, in a store of their own. A rank that ends with an error of its own would end so again: the job ends too.
"""

import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bagu.machine.cores import available_cores
from bagu.parallel import heartbeat
from bagu.parallel.unlike.workers import Cores

GRACE_S = 5.0  # that the other ranks have to end on their own after one has ended
POLL_S = 0.05
REPLAN_S = 1.0  # between questions whether to start by another plan
# A scheduler may signal all processes of a job, and the launcher passes the signal on: both are one request to end.
SAME_SIGNAL_S = 1.0
STOPPED = 130  # exit status of a rank that was asked to save and end


@dataclass(frozen=True, kw_only=True)
class Start:
    """How many ranks to start, their command line, and the cores of each; without, ranks have equal parts."""

    ranks: int
    command: Sequence[str]
    cores: Sequence[Cores] = ()


@dataclass(frozen=True, kw_only=True)
class Job:
    """`plan(attempt)` is what to start the first time (0) and again. `progress()` is how far the run is (its last
    checkpoint): restarts are counted since it last grew. When `replan()` is true, the ranks are asked to save and end,
    and are started by a new plan."""

    plan: Callable[[int], Start]
    max_restarts: int = 3
    hang_timeout_s: float = 600.0
    progress: Callable[[], int] = lambda: 0
    replan: Callable[[], bool] = lambda: False


def supervise(job: Job, say: Callable[[str], None]) -> int:
    """Run a job to its end; return its exit status. `say` prints a line."""
    attempt, restarts, reached = 0, 0, job.progress()
    while True:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bagu-ranks-")))
            ranks = _start(job.plan(attempt), folder)
            stack.callback(_end, ranks)
            codes, replanned = _watch(ranks, job, folder, say)
        attempt += 1
        killed = [rank for rank, code in enumerate(codes) if code < 0]
        if not killed and not (replanned and set(codes) == {STOPPED}):
            return next((code for code in codes if code), 0)
        if not killed:
            continue
        names = ", ".join(f"rank {r} ({signal.Signals(-codes[r]).name})" for r in killed)
        if (now := job.progress()) > reached:
            reached, restarts = now, 0
        if restarts == job.max_restarts:
            times = f"{restarts} restart{'' if restarts == 1 else 's'}"
            say(f"{names} was killed, after {times} without a new checkpoint")
            return 1
        restarts += 1
        say(f"{names} was killed: starting again from the last checkpoint ({restarts} of {job.max_restarts})")


def _start(start: Start, folder: Path) -> list[subprocess.Popen[bytes]]:
    cores = start.cores or [Cores(threads=max(1, available_cores() // start.ranks))] * start.ranks
    shared = {
        "WORLD_SIZE": str(start.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        heartbeat.FOLDER: str(folder),
    }
    started = []
    for rank, mine in zip(range(start.ranks), cores, strict=False):  # a later start may have fewer ranks
        places = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        # a group of its own: Ctrl-C reaches this process, which passes it on once
        started.append(subprocess.Popen(list(start.command), env=mine.environ() | places, start_new_session=True))
        mine.pin(started[-1].pid)
    return started


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _watch(
    ranks: Sequence[subprocess.Popen[bytes]], job: Job, folder: Path, say: Callable[[str], None]
) -> tuple[list[int], bool]:
    """Wait until all ranks have ended, or some have and the grace is over; return their exit statuses, negative for a
    signal, and whether they were asked to end for another plan. Ranks that were only ended by this process count as 0.
    A rank that dies of a signal from the user (it was still starting, or it is the second one) has the status of a
    shell, 128 + signal: it is not started again."""
    watchdog = _Watchdog(folder, len(ranks), job.hang_timeout_s)
    first: float | None = None
    asked, replanned = time.monotonic(), False
    with _Signals(ranks) as passed_on:
        while any(rank.poll() is None for rank in ranks):
            if first is None and any(rank.poll() not in (None, 0) for rank in ranks):
                first = time.monotonic()
            if first is not None and time.monotonic() - first > GRACE_S:
                break
            if (stuck := watchdog.stuck()) is not None and first is None:
                say(stuck.sentence)
                for number in stuck.ranks:
                    ranks[number].kill()
            if not replanned and time.monotonic() - asked > REPLAN_S:
                asked, replanned = time.monotonic(), job.replan()
                for rank in ranks if replanned else ():
                    rank.terminate()
            time.sleep(POLL_S)
    codes = [rank.poll() for rank in ranks]
    _end(ranks)
    ended = [0 if code is None else code for code in codes]
    replanned = replanned and not passed_on  # the user has ended the job
    return [128 - code if -code in passed_on else code for code in ended], replanned


@dataclass(frozen=True, kw_only=True)
class _Stuck:
    ranks: list[int]
    sentence: str


class _Watchdog:
    """Looks at the heartbeats: all ranks have begun, and none has made progress for the timeout."""

    def __init__(self, folder: Path, ranks: int, timeout: float) -> None:
        self.folder, self.ranks, self.timeout = folder, ranks, timeout
        self._best, self._since = -1, time.monotonic()

    def stuck(self) -> _Stuck | None:
        beats = heartbeat.read_beats(self.folder)
        best = max((b.progress for b in beats), default=-1)
        if best != self._best or len(beats) < self.ranks:
            self._best, self._since = best, time.monotonic()
        if time.monotonic() - self._since < self.timeout:
            return None
        self._since = time.monotonic()
        ranks = heartbeat.stuck_ranks(beats, time.time())
        names = ", ".join(f"{b.rank} (process {b.pid})" for b in beats if b.rank in ranks)
        step = min(b.step for b in beats)
        return _Stuck(ranks=ranks, sentence=f"rank {names} hangs at step {step}: no progress for {self.timeout:.0f} s")


class _Signals:
    """Passes Ctrl-C and SIGTERM on to the ranks, which save and end. Inside, the set of the signals passed on."""

    def __init__(self, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
        self.ranks = ranks
        self._passed_on: set[int] = set()

    def __enter__(self) -> set[int]:
        self._before = {s: signal.signal(s, self._pass_on) for s in (signal.SIGINT, signal.SIGTERM)}
        return self._passed_on

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, _: object) -> None:
        self._passed_on.add(number)
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(number)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End every rank that still runs, and reap all."""
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    for rank in ranks:
        rank.wait()
