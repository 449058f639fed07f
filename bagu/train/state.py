"""The configuration of training, and the state that changes while it runs."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from bagu.errors import ArgumentError, UnknownName
from bagu.nn.change import evaluating, place
from bagu.nn.digest import digest_of
from bagu.nn.hollow import Values, is_hollow, value_of
from bagu.nn.model import Transformer
from bagu.parallel.context import Method
from bagu.parallel.mesh import Mesh, MeshConfig
from bagu.parallel.pipeline import Schedule
from bagu.parallel.spread import SpreadOf, everywhere
from bagu.parallel.unlike.shares import Shares
from bagu.train.best import Best, BestConfig
from bagu.train.cross_entropy import CrossEntropy
from bagu.train.loss import Loss, TokenLoss
from bagu.train.memory.divided import DividedModel
from bagu.train.memory.flat import FlatParameters
from bagu.train.memory.fp8 import Fp8Weights
from bagu.train.memory.on_disk import on_disk
from bagu.train.memory.sharded import ShardedParameters, Stage
from bagu.train.optim import Optimizer, OptimizerConfig
from bagu.train.schedule import ScheduleConfig, factor
from bagu.train.served.config import ServedConfig, check_served
from bagu.train.stability import Guard, StabilityConfig

Recompute = Literal["none", "selective", "block"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. The loader determines the tokens of a step, the objective the loss, the model the dtype.

    `clip` is the largest global gradient norm. `compile`: true compiles or raises; null compiles if possible, and
    warns otherwise. `activation_checkpointing` keeps the input of each block ("block"), or its matrix products
    and attention ("selective"), and recomputes the rest in the backward. `precision` "fp8" rounds the operands of the
    products of linear layers, except the head's, to 8 bits (nn/fp8.py); null leaves them in the model's dtype.
    `deterministic` makes a GPU run bitwise reproducible, and slower; on a CPU it keeps the number of threads, which
    otherwise is lower while other processes use the cores. `…_every` counts steps; null is never, and a save also
    happens at the end. `keep_best` keeps, besides the last `keep_last` checkpoints, the one with the best evaluation;
    `best` says what the best is, and when a run that no longer improves ends.

    `mesh` divides the run over ranks (parallel/mesh.py). `zero` is the ZeRO stage of its `shard` dimension; null is 3,
    or 1 with a pipeline. `offload` keeps the divided masters and optimizer state in host memory, and updates there.
    Gradients are reduced in buckets of `bucket_mb` MB. `pipeline` is the schedule of `pp` (null: 1f1b), and
    `stages_per_rank` the number of stages of a rank in an interleaved one (null: 2). `context_parallel` is the method
    of `cp` (null: ring). `served` keeps the parameters on servers instead (bagu/parallel/server). `shares` "measured"
    gives each data-parallel rank micro-batches by its speed (parallel/unlike/shares.py).
    """

    steps: int = 1000
    seed: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    clip: float | None = 1.0
    compile: bool | None = False
    activation_checkpointing: Recompute = "none"
    precision: Literal["fp8"] | None = None
    deterministic: bool = False
    eval_every: int | None = None
    sample_every: int | None = None
    save_every: int | None = None
    keep_last: int = 2
    keep_best: bool = False
    best: BestConfig = field(default_factory=BestConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    zero: Stage | None = None
    offload: bool = False
    bucket_mb: float = 25.0
    pipeline: Schedule | None = None
    stages_per_rank: int | None = None
    context_parallel: Method | None = None
    served: ServedConfig | None = None
    shares: Literal["equal", "measured"] = "equal"

    @property
    def zero_stage(self) -> Stage:
        """The ZeRO stage of a mesh with `shard`."""
        return self.zero or (1 if self.mesh.pp > 1 else 3)

    @property
    def schedule_of_pipeline(self) -> Schedule:
        return self.pipeline or "1f1b"

    @property
    def context_method(self) -> Method:
        return self.context_parallel or "ring"

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
        check_served(self)
        for name in ("steps", "eval_every", "sample_every", "save_every", "keep_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"{name} is {value}", hint="at least 1" + (", or null" if "every" in name else ""))
        if not 0 <= self.seed < 2**63:
            raise ArgumentError(f"seed is {self.seed}", hint="give a number from 0 to 2^63 - 1")
        if self.clip is not None and self.clip <= 0:
            raise ArgumentError(f"clip is {self.clip}", hint="use null for no clipping")
        UnknownName.check("activation_checkpointing", self.activation_checkpointing, get_args(Recompute))
        if self.eval_every is None and (self.best.patience is not None or self.best.metric is not None):
            raise ArgumentError(
                "train.best is set, and nothing is evaluated: eval_every is null", hint="set eval_every"
            )
        if self.best.load_at_end and not self.keep_best:
            raise ArgumentError("best.load_at_end is set without keep_best", hint="set keep_best=true")
        if self.keep_best and (
            self.eval_every is None or self.save_every is None or self.save_every % self.eval_every != 0
        ):
            raise ArgumentError(
                f"keep_best is set with eval_every={self.eval_every} and save_every={self.save_every}",
                hint="a checkpoint is compared by the evaluation at its own step: make save_every a multiple",
            )


def _check_goes_together(config: TrainConfig) -> None:
    """Raise for an option that the mesh gives no effect, or that excludes another one."""
    mesh = config.mesh
    for name, dim, size in (("pipeline", "pp", mesh.pp), ("context_parallel", "cp", mesh.cp)):
        if getattr(config, name) is not None and size == 1:
            raise ArgumentError(
                f"{name} is {getattr(config, name)}, and the mesh {mesh} has no {dim}",
                hint=f"add {dim}, or leave it out",
            )
    if config.pipeline not in (None, *get_args(Schedule)):
        raise UnknownName.among("pipeline schedule", str(config.pipeline), get_args(Schedule))
    if config.context_parallel not in (None, *get_args(Method)):
        raise UnknownName.among("method of context parallelism", str(config.context_parallel), get_args(Method))
    if config.stages_per_rank is not None and (config.pipeline != "interleaved" or config.stages_per_rank < 2):
        raise ArgumentError(
            f"stages_per_rank is {config.stages_per_rank} with the pipeline {config.pipeline}",
            hint="give 2 or more, with pipeline=interleaved",
        )
    if config.compile is not False and (mesh.divides_model or (mesh.shard > 1 and config.zero_stage == 3)):
        what = f"the mesh {mesh} exchanges activations" if mesh.divides_model else "ZeRO stage 3 gathers parameters"
        pair = f"the mesh {mesh}" if mesh.divides_model else "ZeRO stage 3"
        raise ArgumentError(
            f"compile and {pair} do not go together: {what} in hooks of the compiled blocks",
            hint="set compile=false" + ("" if mesh.divides_model else ", or zero=2"),
        )
    if config.precision == "fp8":
        _check_fp8(config)
    if config.shares != "equal":
        _check_shares(config)
    if mesh.pp > 1 and config.zero_stage == 3:
        raise ArgumentError(
            "pp and ZeRO stage 3 do not go together: a backward would need parameters that another micro-batch freed",
            hint="set zero=1 or zero=2",
        )
    if config.pipeline == "zero_bubble" and config.activation_checkpointing == "selective":
        raise ArgumentError(
            "pipeline zero_bubble and activation_checkpointing selective do not go together: "
            "the backward has two parts, and what selective keeps can be used once",
            hint="use activation_checkpointing=block, or pipeline=1f1b",
        )


def _check_shares(config: TrainConfig) -> None:
    """Raise unless ranks may run unlike numbers of micro-batches."""
    mesh = config.mesh
    UnknownName.check("shares", config.shares, ("equal", "measured"))
    for what, why, hint in (
        (
            mesh.shard > 1 and config.zero_stage > 1 and f"ZeRO stage {config.zero_stage}",
            "it sums gradients over the ranks in every backward, and they must run equally many",
            "zero=1",
        ),
        (mesh.ep > 1 and "ep", "ranks exchange tokens in every micro-batch, and must run equally many", "dp"),
        (mesh.pp > 1 and "pp", "the time of a pipeline does not grow by micro-batches alone", "dp"),
        (
            config.served is not None and "parameter servers",
            "a worker that is started again would not know the shares",
            "--workers without --servers",
        ),
        (config.deterministic and "deterministic", "the order of sums would depend on measured times", "equal shares"),
    ):
        if what:
            raise ArgumentError(f"shares measured and {what} do not go together: {why}", hint=f"use {hint}")


def _check_fp8(config: TrainConfig) -> None:
    """Raise if weights cannot be rounded once a step, or the products would not be those of nn/fp8.py."""
    mesh = config.mesh
    for what, why, hint in (
        (
            mesh.divides_model and f"the mesh {mesh}",
            "the scale of a tensor would be that of a part of it",
            "dp or shard",
        ),
        (mesh.shard > 1 and config.zero_stage == 3 and "ZeRO stage 3", "it frees weights within a step", "zero=2"),
        (config.compile is not False and "compile", "the compiler does not see fp8 products", "compile=false"),
    ):
        if what:
            raise ArgumentError(f"precision fp8 and {what} do not go together: {why}", hint=f"use {hint}")


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


def check_token_loss(mesh: MeshConfig, name: str, *, is_token_loss: bool) -> None:
    """Raise if a loss needs more of the model than a rank of the mesh has."""
    dims = [dim for dim in ("tp", "cp", "pp") if getattr(mesh, dim) > 1]
    if dims and not is_token_loss:
        raise ArgumentError(
            f"{name} and {','.join(f'{dim}={getattr(mesh, dim)}' for dim in dims)} do not go together: "
            "the loss needs whole sequences and the whole head on one rank",
            hint="use dp, shard and ep",
        )


def _flat(
    model: nn.Module, config: TrainConfig, mesh: Mesh | None, spread: SpreadOf, values: Values | None
) -> FlatParameters | ShardedParameters:
    bucket_bytes = int(config.bucket_mb * 1e6)
    if mesh is not None and mesh.size("shard") > 1:
        return ShardedParameters(
            model,
            mesh,
            config.zero_stage,
            bucket_bytes=bucket_bytes,
            offload=config.offload,
            spread=spread,
            values=values,
        )
    return FlatParameters(model, mesh, bucket_bytes=bucket_bytes, spread=spread, values=values)


class TrainState:
    """The model with its flat parameters, the loss (by default cross-entropy), the optimizer, and the run's position.

    `model` is what this rank computes with: the caller's model, or its part under tp, cp, pp or ep (`divided`).
    `values` has the weights of a hollow model, which stays hollow outside of this rank's part.
    `step` counts completed steps, `data_step` the loader's steps used; a skipped batch advances only `data_step`.
    `updates` counts the steps that changed the weights, all but idle ones: Adam's bias correction depends on it.
    """

    def __init__(
        self,
        model: Transformer,
        config: TrainConfig,
        loss: Loss[Any, Any] | None = None,
        mesh: Mesh | None = None,
        values: Values | None = None,
    ) -> None:
        self.hollow = values is not None
        check_mesh(config, model, mesh)
        self.mesh = mesh if mesh is not None and mesh.config.ranks > 1 else None
        self.loss: Loss[Any, Any] = CrossEntropy() if loss is None else loss
        check_token_loss(
            config.mesh, f"the loss {type(self.loss).__name__}", is_token_loss=isinstance(self.loss, TokenLoss)
        )
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        # checkpoints do not contain frozen parameters
        self.frozen_digest = digest_of(frozen, values) if frozen else None
        self.divided: DividedModel | None = None
        if self.mesh is not None and self.mesh.config.divides_model:
            self.divided = DividedModel(
                model,
                self.mesh,
                schedule=config.schedule_of_pipeline,
                stages_per_rank=config.stages_per_rank or 2,
                method=config.context_method,
                values=values,
            )
        self.whole = model
        self.model: Any = model if self.divided is None else self.divided.local
        parallel = None if self.divided is None else self.divided.parallel
        for name, p in self.model.named_parameters():
            if not p.requires_grad and is_hollow(p):
                place(p, value_of(name, p, values).clone())
        self.flat = _flat(self.model, config, self.mesh, everywhere if parallel is None else parallel.spread, values)
        if self.divided is not None:
            self.divided.own_memory()
        parts = parallel if config.mesh.tp > 1 else None
        self.optimizer = Optimizer(config.optimizer, self.flat, parts=parts)
        self.config = replace(config, optimizer=self.optimizer.config)  # a checkpoint records the resolved options
        self.guard = Guard(config.stability)
        self.best = Best(config.best, self.loss)
        self.fp8 = None if config.precision is None else Fp8Weights(model, self.device)
        if self.fp8 is not None:
            self.fp8.round()
        self.step = 0
        self.data_step = 0
        self.updates = 0
        measured = config.shares == "measured" and self.mesh is not None and self.mesh.size("data") > 1
        self.shares = Shares(self.config.mesh.size("data")) if measured else None
        self.stop_asked = False  # by Ctrl-C on this rank; a step sets it on every rank

    @property
    def device(self) -> torch.device:
        return self.flat.device

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self.config.optimizer.lr * factor(self.config.schedule, self.step, self.config.steps)

    @property
    def ended(self) -> Mapping[str, Any] | None:
        """Why the run ends before its last step, as facts of an event; None: it goes on."""
        return self.loss.ended or self.best.ended

    def publish(self) -> None:
        """Bring the updated masters into the model, with all that is computed from them."""
        self.flat.publish()
        if self.fp8 is not None:
            self.fp8.round()

    @contextmanager
    def inference(self, *, gathers: bool) -> Iterator[Transformer | DividedModel]:
        """Inside, the yielded model has its current values, in evaluation mode and without gradients: the caller's
        model, or the divided one unless it `gathers`. Every rank enters."""
        with contextlib.ExitStack() as stack:
            if self.mesh is not None:
                stack.enter_context(self.mesh.traffic.uncounted())
            stack.enter_context(torch.no_grad())
            if self.divided is not None and not gathers:
                stack.enter_context(evaluating(self.model))
                yield self.divided
                return
            if self.divided is not None:
                stack.enter_context(self.divided.gathered(self.flat))
            stack.enter_context(evaluating(self.whole))
            yield self.whole

    def close(self, *, gather: bool = True) -> None:
        """Release the flat buffers. With `gather` the caller's model has its trained parameters afterwards; ranks that
        failed do not gather, because the others may not come."""
        if self.fp8 is not None:
            self.fp8.release()
        self.flat.release(gather=gather and not self.hollow)
        if self.divided is not None and gather and not self.hollow:
            self.divided.fill()

    @torch.no_grad()
    def export(self, folder: Path) -> None:
        """Give the caller's hollow model its trained values on rank 0, in files of `folder`. Every rank calls it."""
        first = self.mesh is None or self.mesh.rank == 0
        targets = dict(self.whole.named_parameters())
        mine = dict(self.model.named_parameters())
        left = dict.fromkeys(targets)  # the frozen ones are in no unit of ZeRO-3
        for names in itertools.chain(self.flat.in_turn(), [None]):
            for name in list(left) if names is None else names:
                del left[name]
                value: torch.Tensor | None
                if self.divided is not None:
                    value = self.divided.parallel.whole_on_first(name, mine[name].data if name in mine else None)
                else:
                    value = mine[name].data
                if first:
                    assert value is not None
                    place(targets[name], on_disk(value, folder))
        if self.divided is not None:
            self.divided.fill_buffers()
