"""All model-parallel modes of a mesh applied to one model, and what a trainer needs to know about the result.

    parallel = apply(model, mesh, context=2048)     pp, then ep, tp, cp; the model is used up
    parallel.local                                  this rank's modules, with the parameter names of the model
    parallel.spread(name)                           over which ranks the gradient of a parameter is summed
    parallel.whole_of(name, part)                   a tensor as one process has it; `part_of` is the inverse

A dimension of size 1 changes nothing, so a mesh of dp alone leaves the model as it is.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from bagu.nn import ModelConfig, Transformer
from bagu.nn.hollow import Values
from bagu.parallel.context import Method, check_context_parallel, context_parallel
from bagu.parallel.expert import check_expert_parallel, expert_parallel
from bagu.parallel.mesh import Group, Mesh, MeshConfig
from bagu.parallel.pipeline import Schedule, stages_of
from bagu.parallel.sharding import Division, Placement, Replicated, Split, gather_full
from bagu.parallel.spread import Spread
from bagu.parallel.stages import Stage, build, check_stages, costs, cut
from bagu.parallel.tensor import check_tensor_parallel, tensor_parallel

LAST = ("norm", "mlm", "score", "head")  # the parts of a model after its blocks


@dataclass(frozen=True, kw_only=True)
class ModelParallel:
    """A model divided over the tp, ep, pp and cp of a mesh.

    `modules` are this rank's stages by number, or the model as number 0 without a pipeline. `tensor` and `experts` are
    the placements of its parameters over tp and ep, and empty if those have size 1.
    """

    mesh: Mesh
    whole: Mapping[str, torch.Tensor]  # the parameters and buffers of the model before, without memory
    modules: Mapping[int, Transformer]
    cuts: tuple[range, ...]  # the blocks of each stage
    owners: tuple[int, ...]  # the rank of pp that has each stage
    tensor: Mapping[str, Placement]
    experts: Mapping[str, Placement]

    @property
    def model(self) -> Transformer:
        """The model on this rank, if there is no pipeline."""
        (only,) = self.modules.values()
        return only

    @property
    def stages(self) -> dict[int, Stage]:
        return {i: m for i, m in self.modules.items() if isinstance(m, Stage)}

    @functools.cached_property
    def local(self) -> nn.Module:
        """What this rank has, as one module in which parameters and buffers have the names of the model."""
        return next(iter(self.modules.values())) if len(self.modules) == 1 else _Joined(list(self.stages.values()))

    def is_expert(self, name: str) -> bool:
        """Whether the parameter is divided over ep."""
        return not isinstance(self.experts.get(name, Replicated()), Replicated)

    def spread(self, name: str) -> Spread:
        """Which ranks have a parameter of this rank."""
        ends = [m for m in self.stages.values() if m.is_first or m.is_last]
        # with zero_bubble the first and the last stage are on one rank, and share the parameter
        tied = name == "embedding.weight" and len(ends) == 1 and ends[0].tied
        return Spread(
            expert=self.is_expert(name),
            tensor=not isinstance(self.tensor.get(name, Replicated()), Replicated),
            tied=tied,
            copy=tied and ends[0].is_last,
        )

    def owner(self, name: str) -> int:
        """The rank of pp that has a tensor of the model; the first stage, for a tied embedding."""
        top, _, rest = name.partition(".")
        if top == "blocks":
            layer = int(rest.partition(".")[0])
            return next(rank for rank, blocks in zip(self.owners, self.cuts, strict=True) if layer in blocks)
        return self.owners[-1 if top in LAST else 0]

    def divisions(self, name: str) -> tuple[Division, ...]:
        """How this rank's part of a tensor of the whole model is cut out of it, ep before tp."""
        found = [(places.get(name), group) for places, group in self._divisions()]
        return tuple(
            Division(place.dim, place.blocks, self.mesh.coordinate(group), self.mesh.size(group))
            for place, group in found
            if isinstance(place, Split)
        )

    def part_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of the whole model: a weight, a buffer, or a moment of an optimizer."""
        for places, group in self._divisions():
            place = places.get(name, Replicated())
            whole = place.cut(whole, self.mesh.coordinate(group), self.mesh.size(group))
        return whole

    def whole_of(self, name: str, part: torch.Tensor | None) -> torch.Tensor:
        """A tensor of the whole model on every rank, from every rank's part of it: the inverse of `part_of`.

        All ranks of tp, ep and pp call it, in the same order; those that have other stages pass None.
        """
        if part is not None:
            for places, group in reversed(self._divisions()):
                part = gather_full({name: part.detach()}, places, self.mesh.group(group))[name]
        pp = self.mesh.group("pp")
        if pp is None:
            assert part is not None
            return part.detach()
        if part is None:
            part = torch.empty_like(self.whole[name], device=self.mesh.device)
        part = part.detach().contiguous()
        dist.broadcast(part, group=pp, group_src=self.owner(name))
        return part

    def whole_on_first(self, name: str, part: torch.Tensor | None) -> torch.Tensor | None:
        """The same on the ranks that are the first of tp, ep and pp; the others send their parts, and get None."""
        for places, group in reversed(self._divisions()):
            if part is not None:
                ranks = self.mesh.group(group)
                part = gather_full({name: part.detach()}, places, ranks, first=True)[name].contiguous()
            if self.mesh.coordinate(group):
                return None
        pp, me, owner = self.mesh.group("pp"), self.mesh.coordinate("pp"), self.owner(name)
        if me == owner != 0:
            assert part is not None
            dist.send(part, group=pp, group_dst=0)
        elif me == 0 != owner:
            part = torch.empty_like(self.whole[name], device=self.mesh.device)
            dist.recv(part, group=pp, group_src=owner)
        return part if me == 0 else None

    def whole_over_tp(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The same over tp alone: a matrix that an optimizer needs whole."""
        return gather_full({name: part}, self.tensor, self.mesh.group("tp"))[name]

    def part_over_tp(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return self.tensor.get(name, Replicated()).cut(whole, self.mesh.coordinate("tp"), self.mesh.size("tp"))

    def _divisions(self) -> list[tuple[Mapping[str, Placement], Group]]:
        """The placements in the order in which `apply` divides."""
        both: list[tuple[Mapping[str, Placement], Group]] = [(self.experts, "ep"), (self.tensor, "tp")]
        return [(places, group) for places, group in both if places]


class _Joined(nn.Module):
    """Several stages of one rank as one module, with the names of the model."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__()
        for part in ("embedding", "positions", "token_types", "embedding_norm"):
            setattr(self, part, next((m for s in stages if (m := getattr(s, part)) is not None), None))
        self.blocks = nn.ModuleDict({name: block for stage in stages for name, block in stage.blocks.named_children()})
        for part in LAST:
            setattr(self, part, next((m for s in stages if (m := getattr(s, part)) is not None), None))


def check_model_parallel(
    config: ModelConfig, mesh: MeshConfig, *, schedule: Schedule, stages_per_rank: int, method: Method
) -> None:
    """Raise if a model cannot be divided over the pp, ep, tp and cp of a mesh."""
    if mesh.ep > 1:
        check_expert_parallel(config, mesh.ep)
    if mesh.tp > 1:
        check_tensor_parallel(config, mesh.tp)
    if mesh.cp > 1:
        check_context_parallel(config, method, cp=mesh.cp, tp=mesh.tp)
    if mesh.pp > 1:
        check_stages(config, mesh.pp * len(stages_of(schedule, 0, mesh.pp, stages_per_rank)))


def apply(
    model: Transformer,
    mesh: Mesh,
    *,
    context: int,
    schedule: Schedule = "1f1b",
    stages_per_rank: int = 2,
    method: Method = "ring",
    values: Values | None = None,
) -> ModelParallel:
    """Divide `model` over the pp, ep, tp and cp of `mesh`, in place. All ranks have the same weights before.

    Stages of a pipeline have about equal cost on documents of `context` tokens. Flat buffers, recomputation and
    optimizers are set up afterwards, on `local`. `values` has the weights of a hollow model (nn/hollow.py).
    """
    config, ranks = model.config, mesh.size("pp")
    check_model_parallel(config, mesh.config, schedule=schedule, stages_per_rank=stages_per_rank, method=method)
    whole = {name: torch.empty_like(x, device="meta") for name, x in model.state_dict().items()}
    modules: dict[int, Transformer] = {0: model}
    cuts, owners = [range(config.num_layers)], [0]
    if ranks > 1:
        numbers = [stages_of(schedule, rank, ranks, stages_per_rank) for rank in range(ranks)]
        owner = {stage: rank for rank, mine in enumerate(numbers) for stage in mine}
        cuts, owners = cut(costs(config, context), len(owner)), [owner[i] for i in range(len(owner))]
        modules = dict(build(model, cuts, numbers[mesh.coordinate("pp")]))
    tensor: dict[str, Placement] = {}
    experts: dict[str, Placement] = {}
    for module in modules.values():
        if mesh.size("ep") > 1:
            experts |= expert_parallel(module, mesh, values)
        if mesh.size("tp") > 1:
            tensor |= tensor_parallel(module, mesh, skip=tensor, values=values)
        if mesh.size("cp") > 1:
            context_parallel(module, mesh, method)
    return ModelParallel(
        mesh=mesh, whole=whole, modules=modules, cuts=tuple(cuts), owners=tuple(owners), tensor=tensor, experts=experts
    )
