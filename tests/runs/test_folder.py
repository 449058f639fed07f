"""The run folder: one row per step, no complete row lost when killed, one writer at a time."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagu.config import load
from bagu.errors import BackendError, BaguError
from bagu.runs import lock as lock_file
from bagu.runs.folder import RunFolder, RunRecorder, _truncate
from bagu.runs.observer import Metrics, Observer


@dataclass(frozen=True)
class Config:
    lr: float = 1e-3


class Memory(Observer):
    """An observer that stores the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_step(self, step: int, metrics: Metrics) -> None:
        self.calls.append(("step", step, dict(metrics)))

    def on_event(self, kind: str, step: int, **facts: Any) -> None:
        self.calls.append(("event", kind, step, facts))

    def on_sample(self, step: int, texts: Sequence[str]) -> None:
        self.calls.append(("sample", step, list(texts)))

    def rewind(self, step: int) -> None:
        self.calls.append(("rewind", step))

    def close(self) -> None:
        self.calls.append(("close",))


def recorder(path: Path, *, resume: bool = False, **options: Any) -> RunRecorder:
    return RunRecorder(RunFolder.create(path, Config(), resume=resume), **{"tensorboard": False, **options})


def test_a_run_writes_its_folder(tmp_path: Path) -> None:
    memory = Memory()
    with recorder(tmp_path / "a" / "run", progress=memory) as run:
        run.on_step(0, {"loss_nats": 2.5, "lr": 1e-3, "val_loss_nats": None})
        run.on_event("save", 0, bytes=12)
        run.on_sample(0, ["def f():\n  中文"])
    folder = RunFolder(tmp_path / "a" / "run")
    assert load(Config, folder.config_path) == Config()
    assert folder.environment()["torch"]
    assert folder.metrics() == [{"step": 0, "loss_nats": 2.5, "lr": 1e-3, "val_loss_nats": None}]
    start, save = folder.events()
    assert (start["kind"], start["resumed"], start["changed"]) == ("start", False, [])
    assert (save["kind"], save["step"], save["bytes"]) == ("save", 0, 12)
    assert folder.samples() == {0: ["def f():\n  中文"]}
    assert [call[0] for call in memory.calls] == ["step", "event", "sample", "close"]


def test_a_metric_that_is_not_finite_becomes_null_and_an_event(tmp_path: Path) -> None:
    memory = Memory()
    with recorder(tmp_path, progress=memory) as run:
        run.on_step(3, {"loss_nats": float("nan"), "grad_norm": float("-inf"), "lr": 0.1})
    assert RunFolder(tmp_path).metrics() == [{"step": 3, "loss_nats": None, "grad_norm": None, "lr": 0.1}]
    event = RunFolder(tmp_path).events()[-1]
    assert (event["kind"], event["step"]) == ("non_finite", 3)
    assert event["metrics"] == {"loss_nats": "nan", "grad_norm": "-inf"}
    assert memory.calls[0] == ("step", 3, {"loss_nats": None, "grad_norm": None, "lr": 0.1})


def test_a_metric_must_be_a_number(tmp_path: Path) -> None:
    import numpy as np

    with recorder(tmp_path) as run:
        run.on_step(0, {"loss_nats": np.float32(0.5), "tokens": np.int64(3)})  # type: ignore[dict-item]
        with pytest.raises(BaguError, match="metric loss_nats is a str"):
            run.on_step(1, {"loss_nats": "2"})  # type: ignore[dict-item]
    assert RunFolder(tmp_path).metrics() == [{"step": 0, "loss_nats": 0.5, "tokens": 3}]


def test_rewind_drops_the_steps_that_run_again(tmp_path: Path) -> None:
    memory = Memory()
    with recorder(tmp_path, progress=memory) as run:
        for step in range(5):
            run.on_step(step, {"loss_nats": float(step)})
            run.on_sample(step, [f"text {step}"])
        run.on_event("rollback", 4, to=2)
        run.rewind(2)
        run.on_step(2, {"loss_nats": 20.0})
    folder = RunFolder(tmp_path)
    assert [(r["step"], r["loss_nats"]) for r in folder.metrics()] == [(0, 0.0), (1, 1.0), (2, 20.0)]
    assert list(folder.samples()) == [0, 1]
    assert "rollback" in [e["kind"] for e in folder.events()], "the event log keeps everything"
    assert ("rewind", 2) in memory.calls


@given(st.lists(st.integers(0, 30), unique=True), st.integers(0, 31), st.integers(0, 40))
def test_rewind_keeps_exactly_the_steps_before_it(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], cut: int, torn: int
) -> None:
    """For any steps, any rewind, and any number of bytes of an unfinished row."""
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    rows = [{"step": s, "text": "中" * (s % 3)} for s in sorted(steps)]
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
    unfinished = '{"step": 99, "text": "中文中文中文中文"}'.encode()[:torn]
    path.write_bytes(text.encode() + unfinished)
    _truncate(path, cut)
    kept = path.read_bytes()
    if any(s >= cut for s in steps):
        unfinished = b""
    expected = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows if r["step"] < cut)
    assert kept == expected.encode() + unfinished


def test_a_partial_row_is_dropped_on_open(tmp_path: Path) -> None:
    with recorder(tmp_path) as run:
        run.on_step(0, {"loss_nats": 1.0})
    path = RunFolder(tmp_path).metrics_path
    with path.open("ab") as file:
        file.write('{"step": 1, "loss_nats": 1.0, "中'.encode()[:-1])
    assert len(RunFolder(tmp_path).metrics()) == 1, "a reader of an active run must not see a partial row"
    with recorder(tmp_path, resume=True) as run:
        run.on_step(1, {"loss_nats": 3.0})
    assert [r["step"] for r in RunFolder(tmp_path).metrics()] == [0, 1]


def test_a_broken_row_in_the_middle_is_an_error(tmp_path: Path) -> None:
    with recorder(tmp_path) as run:
        run.on_step(0, {"loss_nats": 1.0})
    path = RunFolder(tmp_path).metrics_path
    path.write_text("{]\n" + path.read_text())
    with pytest.raises(BaguError, match=r"metrics\.jsonl:1: not JSON"):
        RunFolder(tmp_path).metrics()


def test_resume_records_what_has_changed(tmp_path: Path) -> None:
    recorder(tmp_path).close()
    with RunRecorder(RunFolder.create(tmp_path, Config(lr=2e-3), resume=True), tensorboard=False):
        pass
    last = RunFolder(tmp_path).events()[-1]
    assert (last["kind"], last["resumed"], last["changed"]) == ("start", True, ["config.lr: 0.001 → 0.002"])
    assert RunFolder(tmp_path).config() == {"lr": 2e-3}


def test_resume_in_an_empty_folder_starts_a_run(tmp_path: Path) -> None:
    recorder(tmp_path / "new", resume=True).close()
    assert RunFolder(tmp_path / "new").events()[0]["resumed"] is False


def test_other_folders_are_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(BaguError, match=r"is not empty and is not a run: it has thesis\.txt"):
            RunFolder.create(tmp_path, Config(), resume=resume)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(BaguError, match="is a file"):
        RunFolder.create(tmp_path / "thesis.txt", Config())
    recorder(tmp_path / "run").close()
    with pytest.raises(BaguError, match="already holds a run"):
        RunFolder.create(tmp_path / "run", Config())


def test_two_writers_are_refused(tmp_path: Path) -> None:
    with recorder(tmp_path):
        with pytest.raises(BaguError, match=f"process {os.getpid()} on"):
            RunFolder.create(tmp_path, Config(), resume=True)
        assert RunFolder(tmp_path).metrics() == [], "reading needs no lock"
    recorder(tmp_path, resume=True).close()


def _hold(path: Path, ready: Any) -> None:
    RunFolder.create(path, Config())
    ready.set()
    signal.pause()


@pytest.mark.skipif(os.name != "posix", reason="a dead process cannot be detected on Windows")
def test_the_lock_of_another_process_holds_until_it_dies(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    other = context.Process(target=_hold, args=(tmp_path / "run", ready))
    other.start()
    try:
        assert ready.wait(30)
        with pytest.raises(BaguError, match=f"process {other.pid} on"):
            RunFolder.create(tmp_path / "run", Config(), resume=True)
    finally:
        other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie: dead, but not reaped
    folder = RunFolder.create(tmp_path / "run", Config(), resume=True)
    folder.close()
    other.join()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs the start time of a process")
def test_a_reused_pid_is_not_the_owner(tmp_path: Path) -> None:
    recorder(tmp_path).close()
    lock = RunFolder(tmp_path).lock
    lock.take()
    owner = json.loads(lock.path.read_text())
    lock.path.write_text(json.dumps({**owner, "born": "1"}))
    recorder(tmp_path, resume=True).close()
    del owner["renewed"]  # as earlier versions wrote it
    lock.path.write_text(json.dumps({**owner, "host": "elsewhere"}))
    with pytest.raises(BaguError, match="on elsewhere") as caught:
        RunFolder.create(tmp_path, Config(), resume=True)
    assert str(lock.path) in caught.value.hint, "the user must decide about a lock of another machine"


def test_a_lock_of_another_machine_is_taken_over_when_it_is_not_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was killed and requeued on another machine."""
    monkeypatch.setattr(lock_file, "RENEWED_S", 0.1)
    monkeypatch.setattr(lock_file, "WATCHED_S", 1.0)
    recorder(tmp_path).close()
    owner = RunFolder(tmp_path).lock
    owner.take()
    there = json.loads(owner.path.read_text()) | {"host": "elsewhere"}
    owner.path.write_text(json.dumps(there))
    with pytest.raises(BaguError, match="on elsewhere"):
        RunFolder.create(tmp_path, Config(), resume=True)
    owner._released.set()  # its machine is gone
    recorder(tmp_path, resume=True).close()


def test_a_read_only_folder_cannot_be_recorded_to(tmp_path: Path) -> None:
    with pytest.raises(BaguError, match="open read-only"):
        RunRecorder(RunFolder(tmp_path))


@pytest.mark.usefixtures("forked")
def test_a_full_disk_loses_no_row(tmp_path: Path) -> None:
    """A file size limit simulates the full disk: the partial row is removed and an error is raised."""
    script = f"""
import resource, signal
from bagu.errors import BaguError
from bagu.runs.folder import RunFolder, RunRecorder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run = RunRecorder(RunFolder.create({str(tmp_path / "run")!r}, {{}}), tensorboard=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    for step in range(100):
        run.on_step(step, {{"loss_nats": 1.0}})
except BaguError as error:
    print(step, error.hint)
"""
    pytest.importorskip("resource")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    step, hint = done.stdout.split(maxsplit=1)
    assert "disk space" in hint
    assert [r["step"] for r in RunFolder(tmp_path / "run").metrics()] == list(range(int(step)))
    assert RunFolder(tmp_path / "run").metrics_path.read_bytes().endswith(b"\n")


def scalars(folder: Path) -> Mapping[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with recorder(tmp_path, tensorboard=True) as run:
        for step in range(4):
            run.on_step(step, {"loss_nats": float(step), "val_loss_nats": None})
        run.on_sample(3, ["<b>a\n\nb"])
        run.rewind(2)
        run.on_step(2, {"loss_nats": 20.0})
    with recorder(tmp_path, resume=True, tensorboard=True) as run:
        run.rewind(1)
        for step in (1, 2, 3):
            run.on_step(step, {"loss_nats": 10.0 * step})
    assert scalars(tmp_path / "tensorboard") == {"loss_nats": [(0, 0.0), (1, 10.0), (2, 20.0), (3, 30.0)]}


def test_missing_tensorboard_prints_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bagu.runs.folder.environment.package_version", lambda name: None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with recorder(tmp_path, tensorboard=None) as run:
        run.on_step(0, {"loss_nats": 1.0})
        run.on_step(1, {"loss_nats": 1.0})
    assert capsys.readouterr().err.count("bagu[tensorboard]") == 1
    with pytest.raises(BackendError, match="TensorBoard cannot be imported"):
        recorder(tmp_path, resume=True, tensorboard=True)
