"""The configuration of training, and the state that changes while it runs."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from bagu.errors import ArgumentError, UnknownName
from bagu.nn.model import Transformer
from bagu.train.cross_entropy import CrossEntropy
from bagu.train.flat import FlatParameters
from bagu.train.loss import Loss
from bagu.train.optim import Optimizer, OptimizerConfig
from bagu.train.schedule import ScheduleConfig, factor
from bagu.train.stability import Guard, StabilityConfig

__all__ = ["TrainConfig", "TrainState", "digest_of"]

Recompute = Literal["none", "selective", "block"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. The loader determines the tokens of a step, the objective the loss, the model the dtype.

    `clip` is the largest global gradient norm. `compile`: true compiles or raises; null compiles if possible, and
    warns otherwise. `activation_checkpointing` keeps the input of each block ("block"), or its matrix products
    and attention ("selective"), and recomputes the rest in the backward. `deterministic` makes a GPU run bitwise
    reproducible, and slower. `…_every` counts steps; null is never, and a save also happens at the end.
    `keep_best` keeps, besides the last `keep_last` checkpoints, the one with the lowest validation loss.
    """

    steps: int = 1000
    seed: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    clip: float | None = 1.0
    compile: bool | None = False
    activation_checkpointing: Recompute = "none"
    deterministic: bool = False
    eval_every: int | None = None
    sample_every: int | None = None
    save_every: int | None = None
    keep_last: int = 2
    keep_best: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "eval_every", "sample_every", "save_every", "keep_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"{name} is {value}", hint="at least 1" + (", or null" if "every" in name else ""))
        if not 0 <= self.seed < 2**63:
            raise ArgumentError(f"seed is {self.seed}", hint="give a number from 0 to 2^63 - 1")
        if self.clip is not None and self.clip <= 0:
            raise ArgumentError(f"clip is {self.clip}", hint="use null for no clipping")
        if self.activation_checkpointing not in get_args(Recompute):
            raise UnknownName.among("activation_checkpointing", self.activation_checkpointing, get_args(Recompute))
        if self.keep_best and (
            self.eval_every is None or self.save_every is None or self.save_every % self.eval_every != 0
        ):
            raise ArgumentError(
                f"keep_best is set with eval_every={self.eval_every} and save_every={self.save_every}",
                hint="a checkpoint is compared by the evaluation at its own step: make save_every a multiple",
            )


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of the names, shapes, dtypes and values of tensors."""
    digest = hashlib.sha256()
    for name, t in tensors.items():
        digest.update(f"{name} {tuple(t.shape)} {t.dtype}".encode())
        digest.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class TrainState:
    """The model with its flat parameters, the loss (by default cross-entropy), the optimizer, and the run's position.

    `step` counts completed updates, `data_step` the loader's steps used; a skipped batch advances only `data_step`.
    """

    def __init__(self, model: Transformer, config: TrainConfig, loss: Loss[Any, Any] | None = None) -> None:
        self.model = model
        self.loss: Loss[Any, Any] = CrossEntropy() if loss is None else loss
        self.flat = FlatParameters(model)
        self.optimizer = Optimizer(config.optimizer, self.flat)
        self.config = replace(config, optimizer=self.optimizer.config)  # a checkpoint records the resolved options
        self.guard = Guard(config.stability)
        self.step = 0
        self.data_step = 0

    @property
    def device(self) -> torch.device:
        return self.flat.device

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self.config.optimizer.lr * factor(self.config.schedule, self.step, self.config.steps)

    @functools.cached_property
    def frozen_digest(self) -> str | None:
        """A fingerprint of the frozen parameters, which checkpoints do not contain; None if there are none."""
        frozen = {name: p for name, p in self.model.named_parameters() if not p.requires_grad}
        return digest_of(frozen) if frozen else None

    def close(self) -> None:
        """Release the flat buffers; the model keeps its trained parameters."""
        self.flat.release()
