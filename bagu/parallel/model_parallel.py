"""All model-parallel modes of a mesh applied to one model, and what a trainer needs to know about the result.

    parallel = apply(model, mesh, context=2048)            pp, then ep, tp, cp; the model is used up
    parallel.parameters                                    this rank's parts, by the names of the model
    …                                                      forward and backward of every micro-batch
    parallel.sum_gradients(grads)                          once per step, before sums over dp and cp
    full = parallel.full(state, names)                     the one-process state dict; `local` is the inverse

A dimension of size 1 changes nothing, so a mesh of dp alone leaves the model as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from bagu.nn.model import Transformer
from bagu.parallel.collectives import all_reduce
from bagu.parallel.context import Method, context_parallel
from bagu.parallel.expert import expert_parallel
from bagu.parallel.mesh import Group, Mesh
from bagu.parallel.pipeline import Schedule, stages_of, sum_tied
from bagu.parallel.sharding import Placement, Replicated, gather_full, shard
from bagu.parallel.stages import Stage, build, costs, cut
from bagu.parallel.tensor import sum_replicated, tensor_parallel

__all__ = ["ModelParallel", "apply"]

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

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, by the names of the model."""
        return {name: p for module in self.modules.values() for name, p in module.named_parameters()}

    def is_expert(self, name: str) -> bool:
        """Whether the parameter is divided over ep: its gradient is not summed over ep, but over dp, shard and cp."""
        return not isinstance(self.experts.get(name, Replicated()), Replicated)

    def counts(self, name: str) -> bool:
        """Whether this rank adds this parameter to the norm of all gradients, the sum over tp, ep and pp: a parameter
        that several ranks have is counted by one of them."""
        tp, ep = self.mesh.coordinate("tp"), self.mesh.coordinate("ep")
        if tp and isinstance(self.tensor.get(name, Replicated()), Replicated):
            return False
        if ep and not self.is_expert(name):
            return False
        return self.owner(name) == self.mesh.coordinate("pp")

    def owner(self, name: str) -> int:
        """The rank of pp that has a tensor of the model; the first stage, for a tied embedding."""
        top, _, rest = name.partition(".")
        if top == "blocks":
            layer = int(rest.partition(".")[0])
            return next(rank for rank, blocks in zip(self.owners, self.cuts, strict=True) if layer in blocks)
        return self.owners[-1 if top in LAST else 0]

    def sum_gradients(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Complete this rank's gradients over tp and pp, in place: of parameters that are not divided over tp, and of a
        tied embedding. Call it once per step on every rank, after the last backward."""
        if self.tensor:
            sum_replicated(grads, self.tensor, self.mesh)
        if self.stages:
            sum_tied(self.stages, self.mesh, grads)

    def squared_norm(self, grads: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The squared norm of the gradients of the whole model, the same on all ranks of tp, ep and pp."""
        counted = [g.square().sum() for name, g in grads.items() if self.counts(name)]
        total = torch.stack(counted).sum() if counted else next(iter(grads.values())).new_zeros(())
        for group in ("tp", "ep", "pp"):
            all_reduce(self.mesh, total, group)
        return total

    def local(self, full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's part of a state dict of the whole model: weights, buffers, or moments of an optimizer."""
        mine = {name for module in self.modules.values() for name in module.state_dict()}
        state = {name: x for name, x in full.items() if name in mine}
        for places, group in self._divisions():
            state = shard(state, places, self.mesh.coordinate(group), self.mesh.size(group))
        return state

    def full(
        self, state: Mapping[str, torch.Tensor], names: Collection[str], dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]:
        """The tensors `names` of the whole model on every rank, from every rank's part of them: the inverse of `local`.

        `names` is the same on all ranks; a rank has those of its own stages in `state`. `dtype` is that of the tensors,
        if it is not the dtype of the model's own.
        """
        state = {name: x.detach() for name, x in state.items() if name in names}
        for places, group in reversed(self._divisions()):
            state = gather_full(state, places, self.mesh.group(group))
        pp = self.mesh.group("pp")
        if pp is None:
            return state
        every: dict[str, torch.Tensor] = {}
        for name in names:
            like = self.whole[name]
            x = (
                state[name]
                if name in state
                else torch.empty_like(like, dtype=dtype or like.dtype, device=self.mesh.device)
            )
            every[name] = x.contiguous()
            dist.broadcast(every[name], group=pp, group_src=self.owner(name))
        return every

    def _divisions(self) -> list[tuple[Mapping[str, Placement], Group]]:
        """The placements in the order in which `apply` divides."""
        both: list[tuple[Mapping[str, Placement], Group]] = [(self.experts, "ep"), (self.tensor, "tp")]
        return [(places, group) for places, group in both if places]


def apply(
    model: Transformer,
    mesh: Mesh,
    *,
    context: int,
    schedule: Schedule = "1f1b",
    stages_per_rank: int = 2,
    method: Method = "ring",
) -> ModelParallel:
    """Divide `model` over the pp, ep, tp and cp of `mesh`, in place. All ranks have the same weights before.

    Stages of a pipeline have about equal cost on documents of `context` tokens. Flat buffers, recomputation and
    optimizers are set up afterwards, on `parameters`.
    """
    config, ranks = model.config, mesh.size("pp")
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
            experts |= expert_parallel(module, mesh)
        if mesh.size("tp") > 1:
            tensor |= tensor_parallel(module, mesh, skip=tensor)
        if mesh.size("cp") > 1:
            context_parallel(module, mesh, method)
    return ModelParallel(
        mesh=mesh, whole=whole, modules=modules, cuts=tuple(cuts), owners=tuple(owners), tensor=tensor, experts=experts
    )
