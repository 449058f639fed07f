"""Tensor parallelism with sequence parallelism for a Transformer (https://arxiv.org/abs/1909.08053, 2205.05198).

The model keeps its code: its parameters become this rank's parts (sharding.TENSOR), and hooks exchange activations at
the ends of attention and feed-forward network. Inside them a rank has all T tokens and H / t heads or F / t features;
outside, in norms and residual stream, it has T / t tokens and all features.

    embedding                         reduce-scatter  each rank looks up its part of the vocabulary
    attention, ffn of every layer     all-gather before, reduce-scatter after
    hidden states of the output       all-gather      for the vocabulary-parallel loss (vocab_loss.py)

The backward has the opposite collective at each place: a layer has four in each direction. A parameter that is not
divided gets a part of its gradient on each rank, because it is used for some tokens only (a norm), for some heads only
(q_norm), or before divided weights: `sum_replicated` adds the parts once per step.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bagu.errors import ArgumentError
from bagu.nn.attention import Attention
from bagu.nn.block import Block
from bagu.nn.change import around, override, place
from bagu.nn.config import Alibi, ModelConfig
from bagu.nn.hollow import Values, value_of
from bagu.nn.model import Embedding, Output, Transformer
from bagu.nn.moe import Routing
from bagu.nn.positions import RopeEncoding, Signals
from bagu.parallel.collectives import all_reduce
from bagu.parallel.exchange import gather_rows, scatter_sum, share_gradient
from bagu.parallel.mesh import Mesh
from bagu.parallel.sharding import TENSOR, First, Placement, Replicated, placements
from bagu.parallel.vocab_loss import vocab_range


def check_sizes(config: ModelConfig, ranks: int) -> None:
    """Raise if the model's parameters cannot be divided over this many ranks."""
    moe, tp = config.moe, f"tp={ranks}"
    sizes = {"KV heads": config.num_kv_heads, "features of the feed-forward network": config.intermediate_size}
    if moe is not None:
        sizes["features of an expert"] = moe.expert_size
    for what, size in sizes.items():
        if size % ranks:
            raise ArgumentError(f"{tp} does not divide {size} {what}", hint="choose a divisor")
    if config.vocab_size < ranks:
        raise ArgumentError(f"{tp} with a vocabulary of {config.vocab_size}", hint="each rank needs a row")
    _refuse("qk_norm over all heads", config.qk_norm == "width")  # a rank has a part of the heads
    _refuse("weight_norm", config.weight_norm)  # the length of a row needs all of its columns


def check_tensor_parallel(config: ModelConfig, ranks: int) -> None:
    """Raise if the model cannot be trained on this many ranks."""
    check_sizes(config, ranks)
    _refuse("dropout", config.dropout > 0)  # a rank would draw the mask of its own tokens only
    _refuse("batch norm", config.norm.kind == "batch")  # its statistics need all tokens


def _refuse(option: str, used: bool) -> None:
    if used:
        raise ArgumentError(f"tensor parallelism with {option}", hint=f"use a model without {option}, or tp=1")


def tensor_parallel(
    model: Transformer, mesh: Mesh, skip: Collection[str] = (), values: Values | None = None
) -> dict[str, Placement]:
    """Divide a Transformer, or a stage of one, over tp, in place. Returns the placement of each parameter.

    All ranks have the same weights before, and call the model with the same batch of T tokens, T a multiple of the
    ranks. It returns the same hidden states on all ranks. The loss must come from `vocab_cross_entropy`, or from the
    score head, and every rank runs the backward of the full loss. Optimizers and flat buffers are created afterwards.
    `skip` are parameters that are divided already: another stage on this rank shares them. `values` has those of a
    hollow model.
    """
    config, rank, ranks = model.config, mesh.coordinate("tp"), mesh.size("tp")
    check_tensor_parallel(config, ranks)
    places = placements([name for name, _ in model.named_parameters()], TENSOR, config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in skip:
                continue
            place(p, places[name].cut(value_of(name, p, values), rank, ranks).clone())
            if isinstance(places[name], First) and rank:
                p.requires_grad_(False)  # a zero that stays zero: rank 0 adds the bias
    for block in divide_heads(model, ranks):
        _exchange_tokens(block.attention, mesh)
        _exchange_tokens(block.ffn, mesh)
    _divide_ends(model, mesh)
    return places


def divide_heads(model: Transformer, ranks: int) -> list[Block]:
    """Set the number of heads in every layer to one rank's share. Returns the layers."""
    blocks = []
    for block in model.blocks.children():
        assert isinstance(block, Block)
        if isinstance(block.attention, Attention):
            block.attention.num_groups //= ranks
        else:
            block.attention.num_heads //= ranks
        blocks.append(block)
    return blocks


def _exchange_tokens(module: nn.Module, mesh: Mesh) -> None:
    """All tokens into a divided sublayer; the sum over ranks of its result, for this rank's tokens, out of it."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather_rows(args[0], mesh, "tp"), *args[1:]

    def after(_: nn.Module, __: tuple[Any, ...], out: Any) -> Any:
        if isinstance(out, torch.Tensor):
            return scatter_sum(out, mesh, "tp")
        y, routing = out
        aux = None if routing.aux_loss is None else share_gradient(routing.aux_loss, mesh.size("tp"))
        return scatter_sum(y, mesh, "tp"), Routing(aux, routing.load)

    around(module, before=before, after=after)


class VocabEmbedding(Embedding):
    """The rows of a table from `start`. Tokens of other ranks' rows add zeros; a rank keeps T / t rows of the sum."""

    def __init__(self, weight: nn.Parameter, start: int, mesh: Mesh) -> None:
        nn.Module.__init__(self)  # the weight exists
        self.weight, self.start, self.mesh = weight, start, mesh

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if len(ids) % (ranks := self.mesh.size("tp")):
            raise ArgumentError(
                f"tp={ranks} does not divide a batch of {len(ids)} tokens",
                hint="use a number of tokens that is a multiple of tp",
            )
        mine = (ids >= self.start) & (ids < self.start + len(self.weight))
        x = F.embedding(torch.where(mine, ids - self.start, 0), self.weight)
        return scatter_sum(x.masked_fill(~mine.unsqueeze(1), 0.0), self.mesh, "tp")


def _divide_ends(model: Any, mesh: Mesh) -> None:
    """Embedding, positions and output of a model. A stage of a pipeline has some of them."""
    config, rank, ranks = model.config, mesh.coordinate("tp"), mesh.size("tp")
    own = lambda x: x.tensor_split(ranks)[rank]  # noqa: E731
    if model.embedding is not None:
        start, _ = vocab_range(config.vocab_size, rank, ranks)
        model.embedding = VocabEmbedding(model.embedding.weight, start, mesh)
    if model.token_types is not None:
        around(model.token_types, before=lambda _, args: (own(args[0]),))
    positions: Any = model.positions
    if isinstance(positions, RopeEncoding) and positions.num_groups is not None:
        positions.num_groups //= ranks
    # Embeddings are of this rank's tokens, and attention has all tokens of this rank's heads.
    embed, signals = positions.embed, positions.signals
    override(positions, embed=lambda x, at: embed(x, own(at)))
    if isinstance(config.positions, Alibi):
        override(positions, signals=lambda *at: Signals(slopes=own(signals(*at).slopes)))

    def gather_hidden(_: nn.Module, __: tuple[Any, ...], out: Any) -> Any:
        if isinstance(out, Output):
            return out._replace(hidden=gather_hidden(_, __, out.hidden))
        hidden = gather_rows(out, mesh, "tp")
        return hidden if model.score is None else share_gradient(hidden, ranks)  # each rank computes every score

    if getattr(model, "is_last", True):  # a Transformer, or the last stage of one
        around(model, after=gather_hidden)


def sum_replicated(grads: Mapping[str, torch.Tensor], places: Mapping[str, Placement], mesh: Mesh) -> None:
    """Sum the gradients of parameters that are not divided over tp, in place, with one all-reduce.

    Call it once per step, after the last micro-batch. The score head is excluded: its gradient is complete everywhere.
    """
    parts = [g for name, g in grads.items() if isinstance(places[name], Replicated) and not name.startswith("score.")]
    if not parts:
        return
    flat = torch.cat([g.reshape(-1) for g in parts])
    all_reduce(mesh, flat, "tp")
    for g, total in zip(parts, flat.split([g.numel() for g in parts]), strict=True):
        g.copy_(total.view_as(g))
