"""The number of threads beside busy processes: the policy with a clock of its own, and the system's readings."""

import subprocess
import sys
import threading
import time

import pytest
import torch

from bagu.machine.busy import LONGEST, PERIOD, READINGS, CoreTimes, ThreadCount, ThreadPolicy, read_core_times
from bagu.machine.cores import usable_cores


class Machine:
    """Cores, a clock, and what other processes and the threads of this one did until now."""

    def __init__(self, most: int = 2, cores: int = 2) -> None:
        self.at = self.others = self.own = self.waited = 0.0
        self.now = most
        self.policy = ThreadPolicy(most, cores, read=self.read, clock=lambda: self.at)

    def read(self) -> CoreTimes:
        return CoreTimes(used=self.others + self.own, own=self.own, waited=self.waited)

    def run(self, readings: int, *, others: float, waited: float = 0.0) -> list[int]:
        """The number of threads after each reading, while other processes use `others` cores."""
        counts = []
        for _ in range(readings):
            self.at += PERIOD
            self.others += others * PERIOD
            self.waited += waited * PERIOD
            self.own += self.now * PERIOD
            self.now = self.policy.next(self.now)
            counts.append(self.now)
        return counts


def test_a_busy_process_takes_a_thread_away_until_it_ends() -> None:
    machine = Machine()
    assert machine.run(4, others=0.05, waited=0.02) == [2, 2, 2, 2]
    assert machine.run(6, others=0.7, waited=0.5) == [2, 1, 1, 1, 1, 1]
    assert machine.run(4, others=1.0) == [1, 1, 1, 1]  # one thread no longer waits, and the core is not idle
    assert machine.run(3, others=0.05) == [1, 2, 2]


def test_one_reading_changes_nothing() -> None:
    machine = Machine()
    assert machine.run(1, others=0.9, waited=0.9) == [2]
    assert machine.run(1, others=0.0) == [2]
    assert machine.run(1, others=0.9, waited=0.9) == [2]


@pytest.mark.parametrize(
    ("others", "waited"),
    [
        (0.9, 0.05),  # a child process for which this one waits
        (0.05, 0.9),  # more threads of this process than cores
        (0.3, 0.3),  # less than a thread would lose
    ],
)
def test_what_takes_no_thread_away(others: float, waited: float) -> None:
    assert set(Machine().run(20, others=others, waited=waited)) == {2}


def test_threads_are_as_many_as_the_cores_that_are_left() -> None:
    machine = Machine(most=16, cores=16)
    assert machine.run(2, others=0.9, waited=0.5)[-1] == 15
    assert machine.run(2, others=8.0, waited=4.0)[-1] == 8
    assert machine.run(2, others=3.0)[-1] == 13
    assert machine.run(2, others=0.0)[-1] == 16
    assert Machine(most=2).run(2, others=3.0, waited=2.0)[-1] == 1


def test_a_machine_that_is_disturbed_often_waits_longer_and_longer() -> None:
    machine, waits = Machine(), []
    for _ in range(9):
        machine.run(READINGS, others=0.9, waited=0.5)
        counts = machine.run(2 * LONGEST, others=0.0)
        waits.append(counts.index(2) + 1)
        machine.policy._raised = machine.at  # the next process starts soon after
    assert waits[:3] == [2, 4, 8] and waits[-1] == LONGEST


def test_between_two_readings_nothing_is_read() -> None:
    machine = Machine()
    machine.policy._read = lambda: pytest.fail("read too early")
    machine.at += PERIOD / 2
    assert machine.policy.next(2) == 2


def test_a_system_that_reports_nothing_keeps_its_threads() -> None:
    policy = ThreadPolicy(2, 2, read=lambda: None, clock=time.monotonic)
    assert policy.next(2) == 2


def test_the_number_is_set_again_at_the_end() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for end in (lambda count: count.close(), lambda count: None):  # closed, and forgotten
            count = ThreadCount()
            torch.set_num_threads(1)
            assert count.fewer
            end(count)
            del count
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(read_core_times() is None, reason="the system does not report the times of its cores")
def test_readings_beside_a_real_busy_process() -> None:
    """On one core: a busy process uses about half of it, and a thread of this process waits about as long."""
    core, found = usable_cores()[0], {}
    loop = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)

    def work() -> None:
        import os

        os.sched_setaffinity(0, {core})  # of this thread
        before, began = read_core_times(), time.perf_counter()
        while time.perf_counter() - began < 0.5:
            pass
        found.update(before=before, after=read_core_times())

    try:
        import os

        assert loop.stdout is not None and loop.stdout.readline()
        os.sched_setaffinity(loop.pid, {core})
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        loop.kill()
        loop.wait()
    before, after = found["before"], found["after"]
    assert after.waited - before.waited > 0.05
    assert after.used - before.used > after.own - before.own  # another process computed
