"""Stages of a pipeline: contiguous ranges of blocks with about equal predicted cost, and the module of one stage.

A stage keeps the names of the model's parameters (`blocks.3.ffn.down.weight`), so the union of all stages' state dicts
is the state dict of the model. The first stage has the embedding, the last one the final norm and the head.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from bagu.errors import ArgumentError
from bagu.nn import count
from bagu.nn.attention import Context
from bagu.nn.config import ModelConfig, Sinusoidal, T5Relative
from bagu.nn.model import Transformer
from bagu.nn.position_choices import Learned
from bagu.nn.positions import Encoding, make_encoding


@dataclass(frozen=True, kw_only=True)
class Costs:
    """FLOPs per token of a forward: of each block, and of the head with its loss."""

    blocks: tuple[float, ...]
    head: float


def costs(config: ModelConfig, context: int) -> Costs:
    """The predicted cost of each part of a model on documents of `context` tokens."""

    @functools.cache
    def kind(window: int | None, experts: bool) -> tuple[float, float]:
        """The cost of a block and of the head, from models of one and of two such blocks."""
        moe = None if not experts or config.moe is None else replace(config.moe, dense_layers=())
        models = [
            replace(config, num_layers=n, windows=(window,), moe=moe, layer_positions=None, score_head=False)
            for n in (1, 2)
        ]
        one, two = (f.forward + f.other for f in (count.flops(m, context) for m in models))
        return two - one, 2 * one - two

    found = [kind(config.window(i), config.experts(i) is not None) for i in range(config.num_layers)]
    return Costs(blocks=tuple(block for block, _ in found), head=0.0 if config.score_head else found[0][1])


def cut(costs: Costs, stages: int) -> list[range]:
    """The blocks of each stage, such that the most expensive stage costs the least. Each stage has at least one."""
    L = len(costs.blocks)
    _check_number(stages, L)
    until = [0.0]
    for block in costs.blocks:
        until.append(until[-1] + block)

    @functools.cache
    def best(start: int, left: int) -> tuple[float, int]:
        """(cost of the most expensive of `left` stages from block `start`, where the first of them ends)."""
        if left == 1:
            return until[L] - until[start] + costs.head, L
        ends = range(start + 1, L - left + 2)
        return min((max(until[end] - until[start], best(end, left - 1)[0]), end) for end in ends)

    ranges, start = [], 0
    for left in range(stages, 0, -1):
        _, end = best(start, left)
        ranges.append(range(start, end))
        start = end
    return ranges


def _check_number(stages: int, layers: int) -> None:
    if stages > layers:
        raise ArgumentError(f"{stages} stages for {layers} layers", hint="each stage needs a layer: use fewer stages")


def check_stages(config: ModelConfig, stages: int) -> None:
    """Raise if the model cannot be cut into this many stages."""
    _check_number(stages, config.num_layers)
    for option, used in (
        ("dropout", config.dropout > 0),  # stages would draw other masks than one process does
        ("T5 positions", isinstance(config.positions, T5Relative)),  # one table, with a gradient from every stage
    ):
        if used:
            raise ArgumentError(f"a pipeline of a model with {option}", hint=f"use a model without {option}, or pp=1")


class _AddLoss(torch.autograd.Function):
    """x, and a loss whose gradient flows with that of x: the balance loss of a layer that is not in the last stage."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.like = loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], ctx.like


class Stage(Transformer):
    """Some blocks of a model, and its ends if the stage is the first or the last. It uses the model's own modules.

    `forward` takes one micro-batch in the form in which `Pipeline` cuts it: the embedding's ids or the stream x[T, D]
    of the stage before, and positions and offsets with a leading dimension of 1. It returns the stream (residual plus
    delta, so that a boundary costs one tensor), or the hidden states if the stage is the last.
    """

    def __init__(self, model: Transformer, blocks: range) -> None:
        nn.Module.__init__(self)  # the modules exist
        config = self.config = model.config
        check_stages(config, 1)
        self.is_first, self.is_last = blocks.start == 0, blocks.stop == config.num_layers
        own = lambda part, here: part if here else None  # noqa: E731
        self.tied = model.head is None and model.score is None  # the embedding is also the head
        self.embedding = own(  # type: ignore[assignment]
            model.embedding, self.is_first or (self.is_last and self.tied)
        )
        self.token_types = own(model.token_types, self.is_first)
        self.embedding_norm = own(model.embedding_norm, self.is_first)
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in blocks})  # type: ignore[assignment]
        self.norm = own(model.norm, self.is_last)
        self.mlm = own(model.mlm, self.is_last)
        self.score = own(model.score, self.is_last)
        self.head = own(model.head, self.is_last)
        if self.is_first:
            self.positions = model.positions
        elif isinstance(config.positions, (Learned, Sinusoidal)):
            self.positions = Encoding()  # the first stage has added them
        else:
            self.positions = make_encoding(config)
        # Parameters that the first stage has too: a norm or a checkpoint of the model counts them once.
        self.copies = frozenset({"embedding.weight"} if self.embedding is not None and not self.is_first else ())
        self.aux_scale = 1.0  # the weight of a micro-batch's balance loss in the step's loss
        self.aux_losses: list[torch.Tensor] = []  # of the step's micro-batches, times aux_scale
        self.expert_loads: list[tuple[torch.Tensor, ...]] = []

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, *, positions: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int
    ) -> torch.Tensor:
        positions, cu_seqlens = positions[0], cu_seqlens[0]
        self._check(max_len, None)
        if self.is_first:
            x = self._embed(x[0], positions, None)
        context = Context(cu_seqlens, max_len, self.positions.signals(positions, max_len), None)
        delta, routings = None, []
        for block in self.blocks.children():
            x, delta, routing = block(x, delta, context)
            routings += [] if routing is None else [routing]
        for loss in [self.aux_scale * r.aux_loss for r in routings if r.aux_loss is not None]:
            x = _AddLoss.apply(x, loss)
            self.aux_losses.append(loss.detach())
        self.expert_loads.append(tuple(r.load for r in routings))
        if self.is_last:
            return self._finish(x, delta)
        return x if delta is None else x + delta


def build(model: Transformer, cuts: Sequence[range], mine: Sequence[int]) -> dict[int, Stage]:
    """The stages of this rank, by number. The blocks of other stages are left to be freed with `model`."""
    return {i: Stage(model, cuts[i]) for i in mine}
