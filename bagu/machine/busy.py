"""Fewer threads while other processes use the cores of this one.

The threads of a parallel region wait for each other at its end. Where another process shares the core of one of them,
all wait while that one has no time slice: a region of 50 us takes milliseconds. One thread alone is then faster,
because the system gives the other process the other cores.

A loop calls `ThreadCount.adjust` once a step. It takes threads away if other processes use cores and, at the same time,
threads of this process wait for one; both are needed, since child processes for which this one waits are no harm, and
neither are its own threads. It gives threads back when cores are idle. Linux says both (/proc/stat and
/proc/self/task/*/schedstat); elsewhere the number of threads stays.
"""

import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bagu.machine.cores import usable_cores

PERIOD = 0.25  # seconds between two readings; reading takes 0.1 ms
BUSY = 0.4  # cores that other processes use; one busy process beside two threads on two cores gets 0.67 to 1
WAITED = 0.2  # threads of this process that wait for a core, on average over the time between two readings
IDLE = 0.6  # of a core, to compute on it again
READINGS = 2  # in a row before a change: a shorter disturbance costs less than the change
LONGEST = 128  # readings of idle cores before threads are given back, where it happens often: half a minute
SETTLED = 30.0  # seconds: threads taken away sooner than this were given back too early


@dataclass(frozen=True)
class CoreTimes:
    """Seconds, each since some moment in the past."""

    used: float  # of the cores that this process may use, by all processes
    own: float  # of any core, by this process
    waited: float  # by the threads of this process, ready to run, for a core


def read_core_times() -> CoreTimes | None:
    """None where the system does not report them."""
    try:
        stat = Path("/proc/stat").read_text()
        tasks = [path / "schedstat" for path in Path("/proc/self/task").iterdir()]
    except OSError:
        return None
    ticks = {words[0]: words[1:] for words in map(str.split, stat.splitlines()) if words and words[0].startswith("cpu")}
    used = waited = 0
    for core in usable_cores():
        if f"cpu{core}" not in ticks:  # a container that numbers its cores anew
            return None
        user, nice, system, _, _, irq, softirq, *_ = map(int, ticks[f"cpu{core}"])
        used += user + nice + system + irq + softirq
    for task in tasks:
        try:
            waited += int(task.read_text().split()[1])
        except FileNotFoundError:  # the thread has ended, or the kernel has no schedstat
            continue
        except (OSError, IndexError):
            return None
    if not waited:  # a process that has run so far has waited for some microseconds
        return None
    return CoreTimes(used / os.sysconf("SC_CLK_TCK"), time.process_time(), waited / 1e9)


class ThreadPolicy:
    """The number of threads to go on with, by readings of the cores' times: at most `most`, on `cores` cores."""

    def __init__(
        self,
        most: int,
        cores: int,
        *,
        read: Callable[[], CoreTimes | None] = read_core_times,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most, self.cores = most, cores
        self._read, self._clock = read, clock
        self._at, self._times = clock(), read()
        self._busy = self._idle = 0  # readings in a row
        self._patience = READINGS
        self._raised = -SETTLED  # when threads were given back

    def next(self, now: int) -> int:
        """The number of threads to go on with, after `now`."""
        at = self._clock()
        if self._times is None or at - self._at < PERIOD:
            return now
        before, seconds, times = self._times, at - self._at, self._read()
        self._at, self._times = at, times
        if times is None:
            return now
        others = max(times.used - before.used - (times.own - before.own), 0.0) / seconds
        waited = (times.waited - before.waited) / seconds
        self._busy = self._busy + 1 if now > 1 and others >= BUSY and waited >= WAITED else 0
        self._idle = self._idle + 1 if now < self.most and self.cores - others - now >= IDLE else 0
        if self._busy >= READINGS:
            self._patience = min(2 * self._patience, LONGEST) if at - self._raised < SETTLED else READINGS
            self._busy = 0
            return max(1, min(now - 1, round(self.cores - others)))
        if self._idle >= self._patience:
            self._idle, self._raised = 0, at
            return min(self.most, int(self.cores - others + 1 - IDLE))
        return now


class ThreadCount:
    """The number of threads of torch in the thread that creates it, adjusted to what other processes leave. The number
    at the creation is the most, and is set again when this object is closed or forgotten."""

    def __init__(self) -> None:
        self.most = torch.get_num_threads()
        self._policy = ThreadPolicy(self.most, len(usable_cores())) if self.most > 1 else None
        self.close = weakref.finalize(self, _raise_to, self.most)
        self.close.atexit = False

    @property
    def fewer(self) -> bool:
        """Whether there are fewer threads than at the creation."""
        return torch.get_num_threads() < self.most

    def adjust(self) -> int | None:
        """Called once a step: the new number of threads, if it changes."""
        if self._policy is None:
            return None
        now = torch.get_num_threads()
        wanted = self._policy.next(now)
        if wanted == now:
            return None
        torch.set_num_threads(wanted)
        return wanted


def _raise_to(most: int) -> None:
    if torch.get_num_threads() < most:
        torch.set_num_threads(most)
