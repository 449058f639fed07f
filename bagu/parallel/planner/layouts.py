"""Layouts as arrays: one entry of every array is one way to spread a run over the GPUs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from bagu.nn.config import ModelConfig
from bagu.parallel.planner.kernels import Precision
from bagu.parallel.planner.model_cost import ModelCost
from bagu.parallel.planner.software import Stages

Ints = NDArray[np.int64]
Recompute = Literal["none", "selective", "full"]
Schedule = Literal["1f1b", "zero_bubble"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The run to place: a model, its documents, and the global batch in sequences."""

    model: ModelConfig
    seq: int
    batch: int
    precision: Precision = "bf16"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One layout. `dp` counts all data-parallel ranks; ZeRO shards over `shard` of them."""

    # Not a MeshConfig: its dp counts replicas of the shards, and its ep divides dp (see explain.py).
    dp: int = 1
    shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    micro_batch: int = 1
    virtual: int = 1  # stages per rank (interleaved schedule)
    schedule: Schedule = "1f1b"
    recompute: Recompute = "none"

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    def words(self) -> str:
        """Short text: `dp 16 (ZeRO-1) · tp 8 · pp 4`."""
        over = f" over {self.shard}" if self.shard != self.dp else ""
        zero = f" (ZeRO-{self.zero}{over})" if self.zero else ""
        parts = [f"dp {self.dp}{zero}"]
        parts += [f"{name} {getattr(self, name)}" for name in ("tp", "cp", "pp", "ep") if getattr(self, name) > 1]
        if self.pp > 1 and self.schedule == "zero_bubble":
            parts.append("zero-bubble")
        elif self.virtual > 1:
            parts.append(f"{self.virtual} stages a rank")
        parts.append(f"micro-batch {self.micro_batch}")
        if self.recompute != "none":
            parts.append(f"{self.recompute} recomputation")
        return " · ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Many layouts: the fields of `Layout`, with indices into RECOMPUTE and SCHEDULES."""

    dp: Ints
    shard: Ints
    tp: Ints
    cp: Ints
    pp: Ints
    ep: Ints
    zero: Ints
    sequence_parallel: Ints
    micro_batch: Ints
    virtual: Ints
    schedule: Ints
    recompute: Ints

    @classmethod
    def of(cls, *layouts: Layout) -> Layouts:
        columns = {f.name: [getattr(x, f.name) for x in layouts] for f in fields(Layout)}
        columns["schedule"] = [SCHEDULES.index(x.schedule) for x in layouts]
        columns["recompute"] = [RECOMPUTE.index(x.recompute) for x in layouts]
        return cls(**{name: np.asarray(column, dtype=np.int64) for name, column in columns.items()})

    def __len__(self) -> int:
        return len(self.dp)

    def __getitem__(self, i: int) -> Layout:
        values = {f.name: int(getattr(self, f.name)[i]) for f in fields(self)}
        return Layout(
            **{
                **values,
                "sequence_parallel": bool(values["sequence_parallel"]),
                "schedule": SCHEDULES[values["schedule"]],
                "recompute": RECOMPUTE[values["recompute"]],
            }  # type: ignore[arg-type]
        )

    def scheduled(self, schedule: Schedule) -> NDArray[np.bool_]:
        """Which layouts have this pipeline schedule."""
        return self.schedule == SCHEDULES.index(schedule)

    def recomputes(self, how: Recompute) -> NDArray[np.bool_]:
        """Which layouts recompute activations in this way."""
        return self.recompute == RECOMPUTE.index(how)

    def where(self, mask: NDArray[np.bool_] | Ints) -> Layouts:
        return Layouts(**{f.name: getattr(self, f.name)[mask] for f in fields(self)})


Array = NDArray[np.float64]


def stage_layers(cost: ModelCost, pp: NDArray[np.int64], stages: Stages) -> tuple[Array, Array]:
    """(layers of the longest stage without the head, layers of the last stage).

    even: the stages differ by one layer at most, and the last is one of the short ones. ceil: all stages but the last
    have the same number (DeepSpeed). ends: embedding and head count as one layer each. balanced: the head counts as
    many layers as it costs.
    """
    layers = cost.config.num_layers
    if stages == "balanced":
        longest = np.ceil((layers + cost.head_layers) / pp - 1e-9)
        rest = np.maximum(layers - (pp - 1) * longest, 0)
        return np.where(pp == 1, layers, longest), np.where(pp == 1, layers, rest)
    if stages == "ends":
        units = np.ceil((layers + 2) / pp)
        last = np.where(pp == 1, layers, units - 1)
        return np.where(pp == 1, layers, np.where(pp == 2, units - 1, units)), last
    longest = np.ceil(layers / pp)
    rest = layers - (pp - 1) * longest if stages == "ceil" else np.floor(layers / pp)
    return longest, np.where(pp == 1, layers, np.maximum(rest, 0))


def local_parameters(cost: ModelCost, x: Layouts, stages: Stages) -> tuple[Array, Array]:
    """(parameters without routed experts, parameters of routed experts) of the rank that has most."""
    config = cost.config
    most, last = stage_layers(cost, x.pp, stages)
    share = {"dense": 0.0, "replicated": 0.0, "experts": 0.0}
    for layer in cost.layers:
        weight = layer.count / config.num_layers
        share["dense"] += weight * layer.sharded
        share["replicated"] += weight * layer.replicated
        share["experts"] += weight * layer.expert_parameters
    per_layer = share["dense"] / x.tp + share["replicated"]
    tied = cost.embedding if config.tie_embeddings else 0
    ends = cost.embedding + cost.head - tied
    first = most * per_layer + np.where(x.pp == 1, ends, cost.embedding) / x.tp
    final = last * per_layer + np.where(x.pp == 1, ends, cost.head) / x.tp
    return np.maximum(first, final) + cost.final, most * share["experts"] / x.ep
