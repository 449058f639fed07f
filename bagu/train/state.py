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
from bagu.parallel.mesh import Mesh, MeshConfig
from bagu.train.cross_entropy import CrossEntropy
from bagu.train.flat import FlatParameters
from bagu.train.loss import Loss
from bagu.train.optim import Optimizer, OptimizerConfig
from bagu.train.schedule import ScheduleConfig, factor
from bagu.train.sharded import ShardedParameters, Stage
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

    `mesh` divides the run over ranks (parallel/mesh.py). `zero` is the ZeRO stage of its `shard` dimension; null is 3.
    `offload` keeps the divided masters and optimizer state in host memory, and updates there. Gradients are reduced in
    buckets of `bucket_mb` MB.
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
    mesh: MeshConfig = field(default_factory=MeshConfig)
    zero: Stage | None = None
    offload: bool = False
    bucket_mb: float = 25.0

    def __post_init__(self) -> None:
        if self.zero is not None and self.mesh.shard == 1:
            raise ArgumentError(
                f"zero is {self.zero}, and the mesh {self.mesh} has no shard dimension to divide the states over",
                hint="for example mesh shard=4, or leave zero out",
            )
        if self.zero not in (None, *get_args(Stage)):
            raise ArgumentError(f"zero is {self.zero}", hint="the stages are 1, 2 and 3")
        if self.offload and self.mesh.shard == 1:
            raise ArgumentError(
                f"offload is set, and the mesh {self.mesh} has no shard dimension: only divided states are offloaded",
                hint="for example mesh shard=4, or leave offload out",
            )
        if self.bucket_mb <= 0:
            raise ArgumentError(f"bucket_mb is {self.bucket_mb}", hint="25 is usual")
        _check_goes_together(self)
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


def _check_goes_together(config: TrainConfig) -> None:
    """Raise for a mesh that the trainer cannot run, or that excludes another setting."""
    for name in ("pp", "ep", "cp", "tp"):
        size = getattr(config.mesh, name)
        if size > 1:
            raise ArgumentError(
                f"the mesh has {name}={size}, and training divides work by dp and shard only",
                hint=f"leave {name} out",
            )
    if config.mesh.shard > 1 and config.zero in (None, 3) and config.compile is not False:
        raise ArgumentError(
            "compile and ZeRO stage 3 do not go together: stage 3 gathers parameters in hooks of the compiled blocks",
            hint="set compile=false, or zero=2",
        )


def check_mesh(config: TrainConfig, model: Transformer, mesh: Mesh | None) -> None:
    """Raise unless `mesh` is the one of the config, and the model can be trained on it."""
    given = MeshConfig() if mesh is None else mesh.config
    if given != config.mesh:
        raise ArgumentError(
            f"the configuration has the mesh {config.mesh}, and the mesh that is open is {given}",
            hint="pass mesh=open_mesh(config.mesh, device) in every rank",
        )
    if mesh is not None and mesh.size("data") > 1 and model.config.norm.kind == "batch":
        raise ArgumentError(
            "batch norm and data parallelism do not go together: each rank would have statistics of its own batches",
            hint="use another norm, or one rank",
        )


def _flat(model: Transformer, config: TrainConfig, mesh: Mesh | None) -> FlatParameters | ShardedParameters:
    bucket_bytes = int(config.bucket_mb * 1e6)
    if mesh is not None and mesh.size("shard") > 1:
        return ShardedParameters(model, mesh, config.zero or 3, bucket_bytes=bucket_bytes, offload=config.offload)
    return FlatParameters(model, mesh, bucket_bytes=bucket_bytes)


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

    def __init__(
        self, model: Transformer, config: TrainConfig, loss: Loss[Any, Any] | None = None, mesh: Mesh | None = None
    ) -> None:
        check_mesh(config, model, mesh)
        self.model, self.mesh = model, mesh if mesh is not None and mesh.config.ranks > 1 else None
        self.loss: Loss[Any, Any] = CrossEntropy() if loss is None else loss
        self.flat = _flat(model, config, self.mesh)
        self.optimizer = Optimizer(config.optimizer, self.flat)
        self.config = replace(config, optimizer=self.optimizer.config)  # a checkpoint records the resolved options
        self.guard = Guard(config.stability)
        self.step = 0
        self.data_step = 0
        self.stop_asked = False  # by Ctrl-C on this rank; a step sets it on every rank

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
