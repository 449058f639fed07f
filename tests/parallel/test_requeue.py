"""`--resume auto`: one command, repeated by a launcher after kills, ends with the bits of an unbroken run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import ranks
from test_train_ranks import flags, wait_for

from tests.command import bagu

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")

STEPS = 40


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("\n\n".join(f"{i} and {i * i} are {i + i * i}. " * 5 for i in range(300)))
    return folder


def command(data: Path, out: Path) -> list[str]:
    settings = flags(train__steps=STEPS, train__save_every=4)
    return ["train", str(data), *settings, "--mesh", "shard=2", "--resume", "auto", "--out", str(out)]


def weights(out: Path) -> dict[str, bytes]:
    """The model, and the last checkpoint with its optimizer."""
    found = [*out.glob("model/*.safetensors"), *out.glob(f"checkpoints/step-{STEPS:09d}/*.safetensors")]
    assert len(found) > 2
    return {str(path.relative_to(out)): path.read_bytes() for path in found}


def children(pid: int) -> list[int]:
    """The ranks that torchrun has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"bagu" in Path(f"/proc/{child}/cmdline").read_bytes()]


def checkpoint_after(out: Path, step: int) -> int | None:
    """The newest checkpoint, if it is of a later step."""
    newest = max((int(path.name[5:]) for path in out.glob("checkpoints/step-*[0-9]")), default=0)
    return newest if newest > step else None


def start(
    number: int, words: Sequence[str], log: Path, folders: Sequence[Path] = (Path(), Path())
) -> list[subprocess.Popen[str]]:
    """Ranks as another launcher starts them."""
    shared = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port())}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "bagu", *words], text=True, stderr=(log.parent / f"{log.name}-{rank}").open("w"),
            cwd=folders[rank],
            env={**os.environ, **shared, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(number)
    ]  # fmt: skip


@pytest.mark.slow  # 27 s: three starts of two ranks
def test_a_requeued_job_ends_with_the_same_bits(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both ranks are killed after a checkpoint, as when a machine is lost, and the same command comes again."""
    once, again = tmp_path / "once", tmp_path / "again"
    assert ranks.run_bagu(2, command(data, once), tmp_path / "log") == [0, 0], (tmp_path / "log").read_text()
    first = start(2, command(data, again), tmp_path / "first")
    try:
        wait_for(lambda: checkpoint_after(again, 0), first[0])
    finally:
        for rank in first:
            rank.kill()
            rank.wait()
    assert ranks.run_bagu(2, command(data, again), tmp_path / "log") == [0, 0], (tmp_path / "log").read_text()
    assert '"kind": "resume"' in (again / "events.jsonl").read_text()
    assert weights(once) == weights(again)

    alone = [word for word in command(data, again) if word not in ("--mesh", "shard=2")]  # one rank: another layout
    assert bagu(*alone, "--lr", "0.1") == 2
    assert f"{again} holds another run: train.optimizer.lr: 0.007 → 0.1" in capsys.readouterr().err
    environment = json.loads((again / "environment.json").read_text())
    (again / "environment.json").write_text(json.dumps(environment | {"code": "0" * 16}))
    assert bagu(*alone) == 2
    assert "was made by other code (0000000000000000" in capsys.readouterr().err


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("unlike", ["data", pytest.param("folder", marks=pytest.mark.slow)])
def test_ranks_with_other_data_or_another_folder_are_refused(unlike: str, data: Path, tmp_path: Path) -> None:
    """Every rank has a current folder of its own, as on machines that share nothing."""
    for rank, place in enumerate(("a", "b")):
        shutil.copytree(data, tmp_path / place / "data")
        (tmp_path / place / "data" / "b.txt").write_text(f"{rank} " * 100)
    words = [word if word != str(data) else "data" for word in command(data, tmp_path / "out")]
    expected = "rank 1 differs from rank 0: data.data.sha256: "
    if unlike == "folder":
        words = [*words[:-1], "out"]
        where = (tmp_path / "a" / "out").resolve()
        expected = f"rank 1 does not see what rank 0 writes to {where}: the folder is not shared"
    said = on_machines(words, tmp_path)
    assert all(expected in line for line in said), said
    assert all(line.count("\n") == 2 and line.startswith("bagu: ") for line in said), "a sentence and what to do"


def on_machines(words: Sequence[str], tmp_path: Path) -> list[str]:
    """What each of two ranks says that are started in folders `a` and `b`, and end with an error within 30 s of CPU."""
    jobs = start(2, words, tmp_path / "log", folders=[tmp_path / "a", tmp_path / "b"])
    assert all(job.wait(timeout=200) in (2, 75) for job in jobs)
    return [(tmp_path / f"log-{rank}").read_text() for rank in range(2)]


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_is_killed_three_times(data: Path, tmp_path: Path) -> None:
    once, again = tmp_path / "once", tmp_path / "again"
    assert ranks.run_bagu(2, command(data, once), tmp_path / "log") == [0, 0], (tmp_path / "log").read_text()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
    job = subprocess.Popen(
        [*launcher, "-m", "bagu", *command(data, again)], text=True, stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    step = 0
    try:
        for victim in (1, 0, 1):
            step = wait_for(lambda: checkpoint_after(again, step), job)  # noqa: B023
            os.kill(children(job.pid)[victim], signal.SIGKILL)
        said = job.communicate(timeout=240)[1]
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, said
    assert (again / "events.jsonl").read_text().count('"kind": "resume"') == 3
    assert "frame #" not in said and "Traceback" not in said, said
    assert weights(once) == weights(again)


@pytest.mark.parametrize("after_s", [0.5, 2.0])
def test_ctrl_c_during_the_start_says_nothing_of_numpy(data: Path, tmp_path: Path, after_s: float) -> None:
    words = [*command(data, tmp_path / "out"), "--nproc", "2"]
    job = subprocess.Popen([sys.executable, "-m", "bagu", *words], text=True, stderr=subprocess.PIPE)
    time.sleep(after_s)
    job.send_signal(signal.SIGINT)
    said = job.communicate(timeout=60)[1]
    assert job.returncode != 0 and "Traceback" not in said and "numpy" not in said, said
