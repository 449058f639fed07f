"""A run with rollouts for a process of its own, which is killed in the middle of a rollout."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from policy_run import Notes, policy, rollouts

from bagu.config import from_dict
from bagu.runs.folder import RunFolder, RunRecorder
from bagu.train import TrainConfig, fit
from bagu.train.rl.policy_objective import PolicyObjective


class KillAt(Notes):
    """Kills this process while a step is being recorded, when the last checkpoint before it is complete."""

    def __init__(self, step: int, saved: Path) -> None:
        super().__init__()
        self.step, self.saved = step, saved

    def on_step(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        if step == self.step:
            while not self.saved.exists():  # a thread writes it
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: Path, objective: PolicyObjective, options: dict[str, Any], *, resume: bool, kill_at: int | None = None
) -> None:
    """The run in `folder`. With `kill_at` it is killed at that step; it must have saved the step before."""
    torch.set_num_threads(1)
    config = from_dict(TrainConfig, options)
    run = RunFolder.create(folder, config, resume=resume)
    with RunRecorder(run, tensorboard=False) as recorder:
        model = policy()
        loss = objective.loss(model)
        loader = rollouts(model, objective, loss)
        killers = [] if kill_at is None else [KillAt(kill_at, run.checkpoints / f"step-{kill_at:09d}")]
        fit(config, model, loader, loss=loss, folder=run.checkpoints, resume=resume, observers=[recorder, *killers])
