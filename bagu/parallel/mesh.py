"""The mesh: how the ranks of a job are arranged, and the process groups of each dimension.

    pp     pipeline stages                        tp     tensor (and sequence) parallel, inside a layer
    dp     replicas of the model states           cp     context parallel: parts of each sequence
    shard  the model states are divided by it     ep     expert parallel: experts are divided by it

The product of all sizes is the number of ranks. Rank order is row-major in DIMS: neighbours in tp, which communicate
most, have adjacent ranks. Some collectives run over several dimensions at once:

    data             dp shard ep      ranks that get different micro-batches
    loss             dp shard ep cp   ranks whose losses, and gradients of a weight that all of them have, are summed
    experts          dp shard cp      the same for the weights of an expert, which are divided over ep
    replicas         dp ep cp         ranks that have the same part of a weight divided over shard (ZeRO)
    expert_replicas  dp cp            the same for the weights of an expert
    all              every dimension
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Self, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bagu.errors import ArgumentError, UnknownName
from bagu.parallel.traffic import Traffic

Dim = Literal["pp", "dp", "shard", "ep", "cp", "tp"]
Group = Literal["pp", "dp", "shard", "ep", "cp", "tp", "data", "loss", "experts", "replicas", "expert_replicas", "all"]
DIMS: tuple[Dim, ...] = get_args(Dim)  # outermost first
COMBINED: Mapping[Group, tuple[Dim, ...]] = {
    "data": ("dp", "shard", "ep"),
    "loss": ("dp", "shard", "ep", "cp"),
    "experts": ("dp", "shard", "cp"),
    "replicas": ("dp", "ep", "cp"),
    "expert_replicas": ("dp", "cp"),
    "all": DIMS,
}


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The size of each dimension; 1 is not divided. One rank, the default, is an ordinary single-process run."""

    dp: int = 1
    shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for each in fields(self):
            size = getattr(self, each.name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ArgumentError(f"the mesh has {each.name}={size}", hint="give an integer of 1 or more")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The mesh of a text like "dp=2,tp=2,pp=2". Dimensions that are not named have size 1."""
        sizes: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, size = (p.strip() for p in part.partition("="))
            UnknownName.check("mesh dimension", name, DIMS)
            if not equals or not size.isascii() or not size.isdigit():
                raise ArgumentError(f"the mesh has {part!r}", hint=f"give a size, such as {name}=2")
            if name in sizes:
                raise ArgumentError(f"the mesh {text!r} has {name} twice", hint="leave one out")
            sizes[name] = int(size)
        if not sizes:
            raise ArgumentError(f"the mesh {text!r} names no dimension", hint="for example dp=2 or dp=2,tp=2")
        return cls(**sizes)

    def __str__(self) -> str:
        """The text that `parse` reads; dimensions of size 1 are left out."""
        return ",".join(f"{name}={self.size(name)}" for name in DIMS if self.size(name) > 1) or "dp=1"

    def size(self, group: Group) -> int:
        """The number of ranks in a group."""
        size = 1
        for name in COMBINED.get(group, (group,)):
            size *= getattr(self, name)
        return size

    @property
    def ranks(self) -> int:
        """The number of ranks of the whole mesh."""
        return self.size("all")

    @property
    def divides_model(self) -> bool:
        """Whether a rank computes a part of the model, or of a sequence: not only with other micro-batches."""
        return self.tp * self.cp * self.pp * self.ep > 1

    def coordinate(self, group: Group, rank: int) -> int:
        """The index of a rank in its group: 0 to size - 1, row-major for a combined group."""
        at: dict[str, int] = {}
        rest = rank
        for name in reversed(DIMS):
            rest, at[name] = divmod(rest, self.size(name))
        index = 0
        for part in COMBINED.get(group, (group,)):
            index = index * getattr(self, part) + at[part]
        return index

    def smaller(self, micro_batches: int) -> MeshConfig | None:
        """The next smaller mesh whose data-parallel ranks divide the micro-batches of a step; None if there is none."""
        for name in ("dp", "shard"):
            for size in range(self.size(name) - 1, 0, -1):
                mesh = replace(self, **{name: size})
                if micro_batches % mesh.size("data") == 0:
                    return mesh
        return None

    def check_ranks(self, ranks: int) -> None:
        """Raise unless the mesh has exactly this many ranks."""
        if self.ranks != ranks:
            sizes = " x ".join(f"{name} {self.size(name)}" for name in DIMS if self.size(name) > 1) or "1"
            raise ArgumentError(
                f"the mesh {self} has {self.ranks} ranks ({sizes}), and {ranks} are running",
                hint=f"start {self.ranks} ranks (--nproc {self.ranks}), or give a mesh whose sizes multiply to {ranks}",
            )


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This rank's place in a mesh, and its process groups. Made by `open_mesh`.

    `device_mesh` is torch's DeviceMesh with the dimensions that are larger than 1, for DTensor and FSDP2.
    """

    config: MeshConfig
    device: torch.device
    device_mesh: DeviceMesh
    groups: Mapping[Group, dist.ProcessGroup]
    rank: int
    traffic: Traffic = field(default_factory=Traffic, compare=False)  # of every collective over these groups

    def size(self, group: Group) -> int:
        return self.config.size(group)

    def group(self, name: Group) -> dist.ProcessGroup | None:
        """The process group of this rank along a dimension or in a combined group; None if it has one rank only."""
        return self.groups.get(name)

    def coordinate(self, group: Group) -> int:
        """The index of this rank in a group: 0 to size - 1."""
        return self.config.coordinate(group, self.rank)


def open_mesh(config: MeshConfig, device: torch.device) -> Mesh:
    """Create the process groups. Every rank calls it, after torch.distributed is initialised."""
    config.check_ranks(dist.get_world_size())
    names = [name for name in DIMS if config.size(name) > 1] or ["dp"]
    ranks = torch.arange(config.ranks).view([config.size(name) for name in names])
    device_mesh = DeviceMesh(device.type, ranks, mesh_dim_names=tuple(names))
    groups: dict[Group, dist.ProcessGroup] = {name: device_mesh.get_group(name) for name in names}
    # by the dimensions larger than 1: equal groups are created once
    made: dict[tuple[Dim, ...], dist.ProcessGroup] = {(name,): groups[name] for name in names}
    for combined, parts in COMBINED.items():
        inside = tuple(name for name in names if name in parts)
        if inside and inside not in made:
            made[inside] = _combined_group(config, inside)
        if inside:
            groups[combined] = made[inside]
    if config.ranks == 1:
        groups = {}
    return Mesh(config=config, device=device, device_mesh=device_mesh, groups=groups, rank=dist.get_rank())


def _combined_group(config: MeshConfig, parts: tuple[Dim, ...]) -> dist.ProcessGroup:
    """The group of ranks that differ in `parts` only. Ranks create every such group, in the same order."""
    grid = torch.arange(config.ranks).view([config.size(name) for name in DIMS])
    order = [i for i, name in enumerate(DIMS) if name not in parts] + [DIMS.index(name) for name in parts]
    rows = grid.permute(order).reshape(-1, math.prod(config.size(name) for name in parts))
    mine: dist.ProcessGroup | None = None
    for row in rows.tolist():
        group = dist.new_group(row)
        if dist.get_rank() in row:
            mine = group
    assert mine is not None
    return mine
