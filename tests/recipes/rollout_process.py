"""A run with rollouts for a process of its own, which can be killed in the middle of a rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from policy_run import policy, rollouts

from bagu.config import from_dict
from bagu.runs.folder import RunFolder, RunRecorder
from bagu.train import TrainConfig, fit
from bagu.train.policy_objective import PolicyObjective


def train(folder: Path, objective: PolicyObjective, options: dict[str, Any], *, resume: bool) -> None:
    torch.set_num_threads(1)
    config = from_dict(TrainConfig, options)
    run = RunFolder.create(folder, config, resume=resume)
    with RunRecorder(run, tensorboard=False) as recorder:
        model = policy()
        loss = objective.loss_with(model, {})
        loader = rollouts(model, objective, loss)
        fit(config, model, loader, loss=loss, folder=run.checkpoints, resume=resume, observers=[recorder])
