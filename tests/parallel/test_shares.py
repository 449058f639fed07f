"""Data-parallel training with unlike shares: the losses and weights of equal ones, and shares that follow the speed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch.distributed as dist
from ranks import Ranks
from test_train_ranks import flags
from tiny import Alone, Case

from bagu.cli import main
from bagu.errors import ArgumentError
from bagu.parallel.mesh import MeshConfig, open_mesh
from bagu.parallel.unlike.shares import TIMED, WARM_UP
from bagu.train import TrainConfig, TrainState, step
from bagu.train.cross_entropy import CrossEntropy

MEASURED = {"shares": "measured"}
SPEEDS = [(1.0, 3.0), (5.0, 1.0)]


def with_speeds(case: Case, seconds: tuple[float, ...]) -> tiny.Run:
    """A run whose shares are those of workers with such seconds for a micro-batch."""
    how, made = tiny.config(case, alone=False), tiny.model(case)
    state, data = TrainState(made, how, mesh=open_mesh(how.mesh, tiny.CPU)), tiny.loader(case.micro_batches)
    assert state.shares is not None
    found = []
    for s in range(case.steps):
        state.shares._in_use = seconds
        counts = state.shares.counts(case.micro_batches)
        assert max(counts) >= 3 * min(counts)
        result = step(state, data.batch(s))
        found.append((result.loss, result.grad_norm))
    state.close()
    return found, {name: t.detach().clone() for name, t in made.state_dict().items()}


@pytest.mark.parametrize(
    "seconds", [SPEEDS[0], *(pytest.param(s, marks=pytest.mark.slow) for s in SPEEDS[1:])], ids=str
)
@pytest.mark.parametrize(
    "case",
    [
        Case(name="dp", micro_batches=7, options=MEASURED),
        Case(name="zero 1", mesh="shard=2", zero=1, micro_batches=8, options=MEASURED, steps=4),
        Case(name="dropout", micro_batches=7, options=MEASURED, model={"dropout": 0.1}, steps=4),
    ],
    ids=lambda case: case.name,
)
def test_unlike_shares_give_the_run_of_one_process(
    case: Case, seconds: tuple[float, ...], two: Ranks, alone: Alone
) -> None:
    losses, weights = alone.run(case)
    for found, other in two.run(with_speeds, case, seconds):
        assert np.abs(np.array(found) - np.array(losses)).max() <= 1e-12
        for name, value in other.items():
            assert (value - weights[name]).abs().max() <= 1e-12, name


class Waits(CrossEntropy):
    """Cross-entropy that takes some seconds more for each micro-batch."""

    wait_s = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.wait_s)
        return super().__call__(*args, **kwargs)


def slowing(steps: int, slow_from: int) -> list[tuple[int, ...]]:
    """The counts of each step of a run whose rank 1 is slow from some step on."""
    case, loss = Case(name="", options=MEASURED, micro_batches=8), Waits()
    how = tiny.config(case, alone=False)
    state = TrainState(tiny.model(case), how, loss, mesh=open_mesh(how.mesh, tiny.CPU))
    data, found = tiny.loader(case.micro_batches), []
    for s in range(steps):
        loss.wait_s = 0.15 if dist.get_rank() == 1 and s >= slow_from else 0.03
        assert state.shares is not None
        found.append(state.shares.counts(8))
        step(state, data.batch(s))
    state.close()
    return found


def test_shares_follow_a_worker_that_becomes_slow(two: Ranks) -> None:
    found = two.run(slowing, 12, 5)
    assert found[0] == found[1]  # every rank decides the same
    assert found[0][: WARM_UP + TIMED] == [(4, 4)] * (WARM_UP + TIMED)
    assert found[0][-1][0] >= 6  # 7:1 or 6:2, by what else this machine computes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mesh": MeshConfig(shard=2)}, "ZeRO stage 3"),
        ({"mesh": MeshConfig(ep=2)}, "and ep"),
        ({"mesh": MeshConfig(pp=2)}, "and pp"),
        ({"mesh": MeshConfig(dp=2), "deterministic": True}, "and deterministic"),
    ],
)
def test_measured_shares_are_refused_where_ranks_must_run_equally_many(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=f"shares measured {said if said.startswith('and') else 'and ' + said}"):
        TrainConfig(shares="measured", **options)


def texts(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a.txt").write_text("\n\n".join(f"{i} and {i * i} are {i + i * i}. " * 5 for i in range(300)))
    return folder


def status(words: list[str]) -> object:
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code


def events(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_workers_of_the_command_line_train_with_measured_shares_and_resume(tmp_path: Path) -> None:
    data, out = texts(tmp_path / "data"), tmp_path / "run"
    words = ["train", str(data), *flags(train__steps=4, train__save_every=2), "--set", "data.micro_batches=5"]
    assert status([*words, "--workers", "2x cpu:1", "--out", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["train"]["shares"] == "measured" and config["train"]["mesh"]["dp"] == 2
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= row["shares_idle_percent"] < 100 for row in rows)
    again = ["train", "--resume", "--workers", "2", "--out", str(out), "--set", "train.steps=6"]
    assert status(again) == 0
    assert [e["kind"] for e in events(out)].count("resume") == 1


def test_workers_and_nproc_are_refused_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", str(texts(tmp_path / "data")), *flags(), "--out", str(tmp_path / "run")]
    for more, said in (
        (["--workers", "2", "--nproc", "2"], "--workers and --nproc are both given"),
        (["--workers", "cpu,cuda"], "with and without a GPU"),
        (["--workers", "2x cpux"], "kind of worker 'cpux'"),
        (["--workers", "5"], "4 micro-batches"),
    ):
        assert status([*words, *more]) != 0
        assert said in capsys.readouterr().err
