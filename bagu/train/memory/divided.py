"""A model that is divided over the tp, cp, pp and ep of a mesh while it trains.

The caller's model stays whole, but has no memory in the meantime: a copy of it that shares its tensors is divided
(parallel/model_parallel.py), and the parameters become this rank's parts. Held-out losses and samples run on the parts
(divided_forward.py); `gathered` has the whole model on every rank, for whatever takes an ordinary one.
"""

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bagu import ops
from bagu.nn.change import place
from bagu.nn.hollow import Values, is_hollow
from bagu.nn.model import Transformer
from bagu.nn.moe import MoE
from bagu.parallel.context import Method, part_tokens, split_batch
from bagu.parallel.mesh import Mesh
from bagu.parallel.model_parallel import apply
from bagu.parallel.pipeline import Action, Pipeline, Schedule, gather_actions
from bagu.parallel.vocab_loss import vocab_cross_entropy
from bagu.train.loss import Loss, MicroBatch, MicroBatchLoss, TokenLoss, TokenValues, Totals
from bagu.train.memory.flat import FlatParameters, Role, roles
from bagu.train.memory.sharded import ShardedParameters
from bagu.types import IGNORE, Batch

Flat = FlatParameters | ShardedParameters


class DividedModel:
    """This rank's part of a model, and the whole model that it was made from.

    `local` has the parameters and buffers of this rank by the names of the model. `roles` are those of all trained
    parameters of the whole model.
    """

    def __init__(
        self,
        whole: Transformer,
        mesh: Mesh,
        *,
        schedule: Schedule,
        stages_per_rank: int,
        method: Method,
        values: Values | None = None,
    ) -> None:
        self.whole, self.mesh, self.schedule, self.method = whole, mesh, schedule, method
        self.roles: dict[str, Role] = roles(whole)
        self.parallel = apply(
            _sharing(whole),
            mesh,
            context=whole.config.max_len,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            method=method,
            values=values,
        )
        self.local = self.parallel.local
        self.timed = False  # whether to record what the stages do in a step: see Pipeline
        self._pipeline: Pipeline | None = None
        self._values: TokenValues | None = None
        if mesh.size("tp") > 1:
            self._values = functools.partial(vocab_cross_entropy, vocab_size=whole.config.vocab_size, mesh=mesh)

    @property
    def has_stages(self) -> bool:
        return bool(self.parallel.stages)

    @property
    def token_values(self) -> TokenValues:
        """(target_logit, lse) of tokens from hidden states and this rank's rows of the head."""
        return self._values or functools.partial(ops.linear_cross_entropy, ignore_index=IGNORE)

    def own_memory(self) -> None:
        """Free the memory of the whole model. Called after the flat buffers have taken the trained parameters."""
        for p in self.local.parameters():
            if not p.requires_grad and not is_hollow(p):
                place(p, p.data.clone())
        self._free()

    def _free(self) -> None:
        for p in self.whole.parameters():
            place(p, p.data.new_empty(0))

    # --- a step -------------------------------------------------------------------------------------------------------

    def run(self, loss: Loss[Any, Any], batch: MicroBatch, totals: Totals) -> MicroBatchLoss:
        """The forward of a micro-batch without a pipeline. The batch is on the host."""
        if self.mesh.size("cp") > 1:
            (batch,) = self.split([batch])
        batch = batch.to(self.mesh.device, non_blocking=True)
        if self._values is None:
            return loss(self.local, batch, totals)  # type: ignore[arg-type]
        assert isinstance(loss, TokenLoss)
        return loss(self.local, batch, totals, self._values)  # type: ignore[arg-type]

    def run_stages(self, loss: TokenLoss[Any], batches: Sequence[Batch], totals: Totals, flat: Flat) -> MicroBatchLoss:
        """Forward and backward of all micro-batches of this rank through its stages; gradients go to `flat`."""
        scale = batches[0].num_tokens / totals.tokens
        if self.mesh.size("cp") > 1:
            batches = self.split(batches)
        found: list[Any] = []

        def at_head(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            value, metrics = loss.of_hidden(hidden, head, targets, totals, self._values)
            found.append(metrics)
            return value

        pipeline = self._pipeline_for(batches, flat)
        part = pipeline.step([b.to(self.mesh.device, non_blocking=True) for b in batches], at_head, aux_scale=scale)
        zero = torch.zeros((), device=self.mesh.device, dtype=part.dtype)
        return MicroBatchLoss(
            loss=part,
            metrics={name: sum((m[name] for m in found), zero) for name in loss.metric_names},
            expert_load=tuple(
                sum(layer) for stage in self.parallel.stages.values() for layer in zip(*stage.expert_loads, strict=True)
            ),
        )

    def split(self, batches: Sequence[Any]) -> list[Batch]:
        """This rank's tokens of micro-batches, equally many of each."""
        tokens = part_tokens(batches, self.mesh.size("cp"), self.mesh.size("tp")) if self.method == "ring" else None
        return [split_batch(batch, self.mesh, self.method, tokens) for batch in batches]

    def _pipeline_for(self, batches: Sequence[Batch], flat: Flat) -> Pipeline:
        """The pipeline for batches of this many tokens: the padding of the ring changes from step to step."""
        tokens = batches[0].num_tokens
        if self._pipeline is None or self._pipeline.tokens != tokens:

            def after_backward() -> None:
                flat.collect()
                flat.end_backward()

            self._pipeline = Pipeline(
                self.parallel.stages,
                self.mesh,
                schedule=self.schedule,
                micro_batches=len(batches),
                tokens=tokens,
                after_backward=after_backward,
                timed=self.timed,
            )
        return self._pipeline

    def update_balance(self, expert_load: Sequence[torch.Tensor]) -> None:
        """Update the balancing biases of this rank's layers, from the loads of the whole step."""
        rest = list(expert_load)
        for module in self.parallel.modules.values():
            number = sum(isinstance(m, MoE) for m in module.blocks.modules())
            module.update_balance(rest[:number])
            rest = rest[number:]

    def timeline(self) -> list[list[Action]]:
        """The actions of each rank of pp in the last step; empty without a pipeline, or if the model is not `timed`.
        Every rank calls it."""
        return [] if self._pipeline is None or not self.timed else gather_actions(self._pipeline.actions, self.mesh)

    # --- the whole model ----------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, flat: Flat) -> Iterator[Transformer]:
        """Inside, the whole model has its memory and its current values, on every rank."""
        with flat.present():
            self.fill()
        try:
            yield self.whole
        finally:
            self._free()

    @torch.no_grad()
    def fill(self) -> None:
        """Give the whole model its current values. Every rank calls it."""
        mine = self.local.state_dict()
        for name, p in self.whole.named_parameters():
            place(p, self.parallel.whole_of(name, mine.get(name)).clone())
        self.fill_buffers()

    def fill_buffers(self) -> None:
        """Give the whole model its current running statistics and balancing biases. Every rank calls it."""
        mine = self.local.state_dict()
        for name, b in buffers_of(self.whole).items():
            b.copy_(self.parallel.whole_of(name, mine.get(name)))


def _sharing(model: Transformer) -> Transformer:
    """A copy of a model whose parameters are other objects with the same memory."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """State of a model besides its parameters: running statistics, balancing biases."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in model.state_dict().items() if name not in parameters}
