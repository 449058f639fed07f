"""A run killed with SIGKILL at any moment goes on and ends with the bits of a run that was never killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import Notes, loader, model, train

from bagu.runs.folder import RunFolder
from bagu.train import TrainConfig, checkpoint, fit
from bagu.train.interrupt import Interrupt
from bagu.train.optim import OptimizerConfig
from bagu.train.schedule import ScheduleConfig
from bagu.types import Batch
from tests.forked import fork_server

STEPS = 16
OPTIONS = {"steps": STEPS, "save_every": 2, "keep_last": 2, "optimizer": {"lr": 0.01}}
pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL")


@pytest.fixture(scope="module")
def server() -> Any:
    """Processes forked from one that has imported torch and computed nothing: each is real, and starts at once."""
    return fork_server()


def steps_written(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saving(folder: Path) -> bool:
    """A save has begun and is not done: the half-written folder is there."""
    return any((folder / "checkpoints").glob(".partial-*"))


def outcome(folder: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """What must be equal: the metrics that are not timings, and the last checkpoint to the byte."""
    timings = ("tokens_per_s", "data_wait_s", "memory_bytes")
    rows = [{k: v for k, v in row.items() if k not in timings} for row in RunFolder(folder).metrics()]
    last = folder / "checkpoints" / f"step-{STEPS:09d}"
    return rows, {p.name: p.read_bytes() for p in sorted(last.iterdir())}


def test_killed_at_any_step_it_ends_with_the_same_bits(tmp_path: Path, server: Any) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def run(folder: Path, *, resume: bool, kill_at: int | None = None, kill_in_save: bool = False) -> int:
        options = {"resume": resume, "kill_at": kill_at, "kill_in_save": kill_in_save}
        process = server.Process(target=train, args=(folder, OPTIONS), kwargs=options)
        process.start()
        process.join()
        return int(process.exitcode)

    assert run(killed, resume=False, kill_in_save=True) == -signal.SIGKILL
    assert saving(killed) and steps_written(killed)  # no save is complete: the resume starts over
    assert run(killed, resume=True, kill_at=7) == -signal.SIGKILL  # a save is done before the next one begins: 2 and 4
    assert run(killed, resume=True, kill_in_save=True) == -signal.SIGKILL  # now there are complete saves too
    assert saving(killed)
    for step in (9, 13):
        assert run(killed, resume=True, kill_at=step) == -signal.SIGKILL
    assert run(killed, resume=True) == run(whole, resume=False) == 0
    (want_rows, want_files), (rows, files) = outcome(whole), outcome(killed)
    assert [row["step"] for row in rows] == list(range(STEPS))  # none lost, none twice
    assert rows == want_rows
    assert files == want_files  # weights, optimizer, cursor, guard
    assert not list((killed / "checkpoints").glob(".partial-*"))


class PressAt(Notes):
    """Presses Ctrl-C while a step is being recorded."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.at = step

    def on_step(self, step: int, metrics: Any) -> None:
        super().on_step(step, metrics)
        if step == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def test_signals_within_a_second_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler signals every process of a job, and the launcher passes its signal on."""
    with Interrupt() as interrupt:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.asked
        monkeypatch.setattr("bagu.train.interrupt.SAME_SIGNAL_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_finishes_the_step_saves_and_can_go_on(tmp_path: Path) -> None:
    config = TrainConfig(steps=20)
    whole, again = model(dropout=0.1), model(dropout=0.1)
    fit(config, whole, loader())
    notes, before = PressAt(8), signal.getsignal(signal.SIGINT)
    first = fit(config, model(dropout=0.1), loader(), folder=tmp_path, observers=[notes])
    assert first.interrupted and first.step == 9 and notes.of("interrupt")
    assert first.checkpoint is not None and checkpoint.state_of(first.checkpoint)["step"] == 9
    assert signal.getsignal(signal.SIGINT) is before
    second = fit(config, again, loader(), folder=tmp_path, resume=True)
    assert second.step == 20 and not second.interrupted
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_run_is_the_same_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    config = TrainConfig(steps=30, deterministic=True, compile=compiled, activation_checkpointing="selective")
    models = [model(torch.bfloat16, "cuda", head_dim=32, dropout=0.1) for _ in range(3)]
    whole, begun, again = models
    fit(config, whole, loader(micro_batches=2))
    fit(config, begun, loader(micro_batches=2), folder=tmp_path, observers=[PressAt(11)])
    result = fit(config, again, loader(micro_batches=2), folder=tmp_path, resume=True)
    assert result.step == 30
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


class Remembering:
    """A loader whose step depends on the steps before it: it draws a data step, and adds all draws so far."""

    def __init__(self) -> None:
        self.data, self.drawn = loader(), 0

    @contextlib.contextmanager
    def prefetch(self, start: int) -> Iterator[Iterator[tuple[Batch, ...]]]:
        yield map(self.batch, itertools.count(start))

    def batch(self, step: int) -> tuple[Batch, ...]:
        self.drawn = (3 * self.drawn + step) % 50
        return self.data.batch(self.drawn)

    def cursor(self, step: int) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        self.drawn = cursor["drawn"]


def test_a_resume_restores_what_the_loader_keeps_between_steps(tmp_path: Path) -> None:
    config = TrainConfig(steps=12)
    whole, again = model(), model()
    fit(config, whole, Remembering())
    fit(config, model(), Remembering(), folder=tmp_path, pause_after=7)
    fit(config, again, Remembering(), folder=tmp_path, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    config = TrainConfig(steps=4)
    done = fit(config, model(), loader(), folder=tmp_path)
    again = model()
    result = fit(config, again, loader(), folder=tmp_path, resume=True)
    assert result.step == 4 and result.checkpoint == done.checkpoint and result.metrics == {}


@pytest.mark.slow
def test_a_run_paused_before_its_cooldown_and_given_another_length_is_a_run_of_that_length(tmp_path: Path) -> None:
    """What `bagu demo` does when its first steps show how many fit into its time."""
    schedule = ScheduleConfig(kind="wsd", warmup_steps=2, decay_share=0.5)
    planned = TrainConfig(steps=40, schedule=schedule, optimizer=OptimizerConfig(kind="muon", lr=0.01))
    for steps in (10, 24):
        changed = replace(planned, steps=steps)
        whole, paused, resumed, folder = model(), model(), model(), tmp_path / str(steps)
        fit(changed, whole, loader())
        first = fit(planned, paused, loader(), folder=folder, pause_after=5)
        assert first.step == 5 and not first.interrupted and first.checkpoint is not None
        last = fit(changed, resumed, loader(), folder=folder, resume=True)
        assert last.step == steps
        for (name, want), got in zip(whole.named_parameters(), resumed.parameters(), strict=True):
            assert torch.equal(want, got), name
