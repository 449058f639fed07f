"""Starting ranks: restarts after a kill, errors without a restart, a hanging rank named, no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bagu.parallel import supervise as supervising
from bagu.parallel.heartbeat import Beat, stuck_ranks
from bagu.parallel.supervise import Job, Start, supervise

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")

HEAD = """
import os, signal, sys, time
from pathlib import Path
from bagu.parallel.heartbeat import FOLDER, Heartbeat
rank, out, attempt = int(os.environ["RANK"]), Path(sys.argv[1]), int(sys.argv[2])
(out / f"{attempt}-{rank}").write_text(str(os.getpid()))
"""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that sleep for ever are ended after 0.2 s, not after five."""
    monkeypatch.setattr(supervising, "GRACE_S", 0.2)


def job(out: Path, body: str, ranks: int = 2, **options: float) -> Job:
    """Ranks that run a script without torch."""
    script = HEAD + textwrap.dedent(body)

    def plan(attempt: int) -> Start:
        return Start(ranks=ranks, command=[sys.executable, "-c", script, str(out), str(attempt)])

    return Job(plan=plan, **options)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def started(out: Path) -> dict[str, int]:
    return {p.name: int(p.read_text()) for p in out.iterdir()}


def test_a_killed_rank_starts_all_again(tmp_path: Path) -> None:
    """Rank 1 is killed at the first start; the other would wait for ever. The second start ends well."""
    said: list[str] = []
    body = """
    if attempt == 0:
        if rank == 1:
            while not (out / "0-0").exists(): time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    """
    assert supervise(job(tmp_path, body), said.append) == 0
    assert said == ["rank 1 (SIGKILL) was killed: starting again from the last checkpoint (1 of 3)"]
    assert started(tmp_path).keys() == {"0-0", "0-1", "1-0", "1-1"}
    assert not any(alive(pid) for pid in started(tmp_path).values())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ranks_that_the_user_ends_are_not_started_again(tmp_path: Path, number: int, status: int) -> None:
    """Ranks without a handler, as while they import torch, die of the signal that is passed on to them."""
    body = f"""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    (out / f"ready-{{rank}}").write_text("0")
    if attempt == 0:
        if rank == 0:
            while not (out / "ready-1").exists(): time.sleep(0.01)
            os.kill(os.getppid(), {int(number)})
        time.sleep(1000)
    """
    assert supervise(job(tmp_path, body), lambda line: None) == status
    assert {"0-0", "0-1"} <= started(tmp_path).keys() and "1-0" not in started(tmp_path)


def test_restarts_are_limited(tmp_path: Path) -> None:
    said: list[str] = []
    body = "os.kill(os.getpid(), signal.SIGKILL)"
    assert supervise(job(tmp_path, body, ranks=1, max_restarts=1), said.append) == 1
    assert said[-1] == "rank 0 (SIGKILL) was killed, after 1 restart without a new checkpoint"


def test_restarts_are_counted_since_the_last_checkpoint(tmp_path: Path) -> None:
    """One restart is allowed; three kills, each after progress, are survived."""
    said: list[str] = []
    body = "if attempt < 3: os.kill(os.getpid(), signal.SIGKILL)"
    made = replace(job(tmp_path, body, ranks=1, max_restarts=1), progress=lambda: len(started(tmp_path)))
    assert supervise(made, said.append) == 0
    assert [line[-8:] for line in said] == ["(1 of 1)"] * 3


def test_ranks_that_end_for_another_plan_are_started_again(tmp_path: Path) -> None:
    body = """
    if attempt == 0:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
        (out / "ready").write_text("0")
        time.sleep(1000)
    """
    made = replace(job(tmp_path, body, ranks=1), replan=lambda: (tmp_path / "ready").exists())
    said: list[str] = []
    assert supervise(made, said.append) == 0
    assert {"0-0", "1-0"} <= started(tmp_path).keys() and said == []


def test_an_error_of_its_own_ends_the_job_without_a_restart(tmp_path: Path) -> None:
    said: list[str] = []
    assert supervise(job(tmp_path, "sys.exit(2) if rank == 1 else time.sleep(1000)"), said.append) == 2
    assert said == [] and started(tmp_path).keys() <= {"0-0", "0-1"}
    assert not any(alive(pid) for pid in started(tmp_path).values())


def test_a_hanging_rank_is_named_and_killed(tmp_path: Path) -> None:
    """Rank 1 makes no progress after 3 collectives, so rank 0 stays in its fourth."""
    said: list[str] = []
    body = """
    if attempt == 0:
        with Heartbeat(Path(os.environ[FOLDER]), rank, lambda: (3 if rank else 4, 7)):
            time.sleep(1000)
    """
    assert supervise(job(tmp_path, body, hang_timeout_s=1.0), said.append) == 0
    pid = started(tmp_path)["0-1"]
    assert said[0] == f"rank 1 (process {pid}) hangs at step 7: no progress for 1 s"
    assert "starting again" in said[1]


def test_the_stuck_rank_is_the_silent_one_or_the_one_behind() -> None:
    def beat(rank: int, progress: int, age: float) -> Beat:
        return Beat(rank=rank, pid=rank, progress=progress, step=0, time=100 - age)

    assert stuck_ranks([beat(0, 9, 0), beat(1, 9, 60)], 100) == [1]  # stopped as a whole: SIGSTOP, a dead machine
    assert stuck_ranks([beat(0, 9, 0), beat(1, 8, 0), beat(2, 9, 0)], 100) == [1]


def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from pathlib import Path
from test_supervise import job
from bagu.parallel.supervise import supervise
body = '''
with Heartbeat(Path(os.environ[FOLDER]), rank, lambda: (0, 0)):
    time.sleep(1000)
'''
supervise(job(Path({str(tmp_path)!r}), body), print)
"""
    launcher = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 120
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    pids = started(tmp_path).values()
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2 and not any(alive(pid) for pid in pids)
