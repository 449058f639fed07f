"""A run killed in the middle of the steps of a rollout goes on and ends with the bits of a run that was not killed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_process import train

from bagu.runs.folder import RunFolder
from bagu.train import checkpoint
from bagu.train.rl.grpo import GroupRelative
from bagu.train.rl.policy_objective import PolicyObjective
from bagu.train.rl.ppo import ProximalPolicy
from tests.variants import some

STEPS, KILL_AT = 8, 6
OPTIONS: dict[str, Any] = {"steps": STEPS, "save_every": 3, "keep_last": 8, "optimizer": {"lr": 0.02}}
SHAPE: dict[str, Any] = {"prompts": 3, "samples": 3, "max_tokens": 4, "epochs": 2, "minibatches": 2, "invariant": True}
OBJECTIVES: dict[str, PolicyObjective] = {
    "grpo": GroupRelative(kl=0.05, **SHAPE),
    "ppo": ProximalPolicy(kl=0.05, kl_target=0.01, **SHAPE),
}
TIMINGS = ("tokens_per_s", "data_wait_s", "memory_bytes", "rollout_s", "reward_s", "prepare_s", "update_s",
           "rollout_tokens_per_s", "update_tokens_per_s")  # fmt: skip
pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the other process: the bits of a sum depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def outcome(folder: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """What must be equal: the metrics that are not times, and the last checkpoint to the byte."""
    rows = [{k: v for k, v in row.items() if k not in TIMINGS} for row in RunFolder(folder).metrics()]
    last = folder / "checkpoints" / f"step-{STEPS:09d}"
    names = ("model.safetensors", "optimizer.safetensors", "state.json")
    return rows, {name: (last / name).read_bytes() for name in names}


@pytest.mark.parametrize("kind", some(list(OBJECTIVES), ("ppo",)))
def test_killed_inside_a_rollout_it_ends_with_the_same_bits(tmp_path: Path, kind: str, forkserver: Any) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = {"resume": False, "kill_at": KILL_AT}
    process = forkserver.Process(target=train, args=(killed, OBJECTIVES[kind], OPTIONS), kwargs=options)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    saved = checkpoint.checkpoints(killed / "checkpoints")
    assert [path.name[-1] for path in saved] == ["3", "6"]
    for path in saved:  # a rollout has four steps: both are in the middle of one
        assert len(checkpoint.state_of(path)["cursor"]["rollout"]["rewards"]) > 0
    for folder, resume in ((killed, True), (whole, False)):
        train(folder, OBJECTIVES[kind], OPTIONS, resume=resume)
    assert outcome(killed) == outcome(whole)
    assert [row["step"] for row in RunFolder(killed).metrics()] == list(range(STEPS))


def test_a_run_ends_by_its_reward_and_a_resume_ends_there_too(tmp_path: Path) -> None:
    """The share of c is about 1/8 at first: two rollouts of 0.05 or more, of four steps each, end the run early."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    objective = GroupRelative(stop_reward=0.05, stop_rollouts=2, **SHAPE)
    options = {**OPTIONS, "steps": 40, "save_every": 2}
    train(whole, objective, options, resume=False)
    ended = [row["step"] for row in RunFolder(whole).metrics()][-1] + 1
    (event,) = (e for e in RunFolder(whole).events() if e["kind"] == "ended_early")
    assert ended == event["step"] < 40 and event["rollouts"] == 2 and event["reward_mean"] >= 0.05
    last = checkpoint.checkpoints(whole / "checkpoints")[-1]
    assert checkpoint.state_of(last)["step"] == ended
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / last.name)
    for folder in (again, whole):  # from the checkpoint before, and from the end
        train(folder, objective, options, resume=True)
    rows = [[r["step"] for r in RunFolder(folder).metrics()] for folder in (whole, again)]
    assert rows[0] == rows[1] == list(range(ended))
    other = again / "checkpoints" / last.name
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (other / name).read_bytes() == (last / name).read_bytes()
    assert checkpoint.state_of(other)["loss"] == checkpoint.state_of(last)["loss"]
