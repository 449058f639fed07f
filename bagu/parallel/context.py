"""Context parallelism: each rank has a part of the tokens of every document, and attention reaches the other parts.

    ring      keys and values travel around the ranks (https://arxiv.org/abs/2310.01889); partial results are merged by
              their logsumexp. Needs causal attention without window and without a bias by distance.
    ulysses   an all-to-all before attention gives each rank all tokens of H / c heads, a second one returns
              (https://arxiv.org/abs/2309.14509). Needs KV heads that c divides; works with every softmax attention.

Everything outside of attention is per token and stays as it is; gradients of all parameters are sums over cp. Ulysses
divides the T tokens of a batch into c equal parts. The ring divides every document into 2c chunks, and rank r has
chunks r and 2c - 1 - r of each, so that every rank has the same number of tokens and of causal (query, key) pairs. A
document whose length is no multiple of 2c is padded at its end. No real token attends to padding: it comes after all of
them, and attention is causal.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import torch

from bagu.errors import ArgumentError
from bagu.nn.attention import Attention, Context, Softmax
from bagu.nn.config import Alibi, ModelConfig, T5Relative
from bagu.nn.mla import MLA
from bagu.nn.model import Transformer
from bagu.parallel.exchange import swap_rows
from bagu.parallel.mesh import Mesh
from bagu.parallel.ring_attention import ring_attention
from bagu.types import IGNORE, Batch

Method = Literal["ring", "ulysses"]


def check_context_parallel(config: ModelConfig, method: Method, *, cp: int, tp: int = 1) -> None:
    """Raise if attention of the model cannot be divided over cp ranks in this way."""
    moe, mode = config.moe, f"cp={cp} by {method}"
    if method == "ulysses" and config.num_kv_heads % (tp * cp):
        raise ArgumentError(
            f"{mode} with tp={tp} does not divide {config.num_kv_heads} KV heads", hint="use the ring, or a smaller cp"
        )
    ring = method == "ring"
    for option, used in (
        ("linear attention", config.attention == "linear"),
        ("attention to chosen blocks", config.attention == "blocks"),
        ("dropout", config.dropout > 0),  # a rank would draw the mask of its own tokens only
        ("batch norm", config.norm.kind == "batch"),  # its statistics need all tokens
        ("the balance loss of experts", moe is not None and moe.aux_weight is not None),  # likewise
        ("balancing biases of experts", ring and moe is not None and moe.bias_rate is not None),  # would count padding
        ("bidirectional attention", ring and not config.causal),
        ("attention sinks", config.sinks),
        ("a window", ring and any(w is not None for w in config.windows)),
        ("a bias by distance", ring and isinstance(config.positions, (Alibi, T5Relative))),
    ):
        if used:
            hint = (
                "use ulysses"
                if ring
                and option
                not in ("linear attention", "attention to chosen blocks", "dropout", "batch norm", "attention sinks")
                else "use cp=1"
            )
            raise ArgumentError(f"{mode} with {option}", hint=hint)


def context_parallel(model: Transformer, mesh: Mesh, method: Method = "ring") -> None:
    """Make attention of the model, or of a stage of one, reach the tokens of all ranks of cp, in place.

    Each rank then calls it with its part of a batch, from `split_batch`. Apply it before or after `tensor_parallel`.
    """
    config = model.config
    check_context_parallel(config, method, cp=mesh.size("cp"), tp=mesh.size("tp"))
    for attention in model.blocks.modules():
        if isinstance(attention, (Attention, MLA)) and attention.softmax is not None:
            kind = RingSoftmax if method == "ring" else UlyssesSoftmax
            attention.softmax = kind(config, attention.softmax.layer, mesh)


class ContextSoftmax(Softmax):
    """Softmax attention that reaches the tokens of all ranks of cp."""

    def __init__(self, config: ModelConfig, layer: int, mesh: Mesh) -> None:
        super().__init__(config, layer)
        self.mesh = mesh


class RingSoftmax(ContextSoftmax):
    """Softmax attention in which keys and values of all ranks of cp are used, in turn."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, *, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert sinks is None, "context parallelism refuses models with sinks"
        return ring_attention(q, k, v, context.cu_seqlens, context.max_len, self.scale, self.mesh)


class UlyssesSoftmax(ContextSoftmax):
    """Softmax attention of all tokens of the ranks of cp, for a part of the heads."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, *, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert sinks is None, "context parallelism refuses models with sinks"
        rank, ranks = self.mesh.coordinate("cp"), self.mesh.size("cp")
        slopes, bias = (
            None if x is None else x.tensor_split(ranks)[rank] for x in (context.signals.slopes, context.signals.bias)
        )
        context = context._replace(signals=context.signals._replace(slopes=slopes, bias=bias))
        out = super().forward(self.all_tokens(q), self.all_tokens(k), self.all_tokens(v), context)
        return self.all_heads(out)

    def all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[T / c, H, D] to [T, H / c, D]."""
        c, (t, H, D) = self.mesh.size("cp"), x.shape
        by_head = x.view(t, c, H // c, D).transpose(0, 1).reshape(c * t, H // c, D)
        return swap_rows(by_head, [t] * c, [t] * c, self.mesh, "cp")

    def all_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H / c, E] to [T / c, H, E]."""
        c, (T, h, E) = self.mesh.size("cp"), x.shape
        by_head = swap_rows(x, [T // c] * c, [T // c] * c, self.mesh, "cp")
        return by_head.view(c, T // c, h, E).transpose(0, 1).reshape(T // c, c * h, E)


def split_batch(batch: Batch, mesh: Mesh, method: Method = "ring", tokens: int | None = None) -> Batch:
    """This rank's part of a batch, whose tensors are on the host. All ranks of cp pass the same batch.

    The part of Ulysses keeps the offsets of the whole batch, because its attention has all tokens. A part of the ring
    is padded to `tokens`, from `part_tokens`. Divide losses by the counts of the whole batch; `target_bytes` is counted
    by the first rank.
    """
    rank, ranks = mesh.coordinate("cp"), mesh.size("cp")
    if method == "ulysses":
        if batch.num_tokens % ranks:
            raise ArgumentError(
                f"cp={ranks} does not divide a batch of {batch.num_tokens} tokens", hint="use a multiple"
            )
        own = slice(rank * batch.num_tokens // ranks, (rank + 1) * batch.num_tokens // ranks)
        ids, targets, positions = (x[own] for x in (batch.ids, batch.targets, batch.positions))
        part = replace(batch, ids=ids, targets=targets, positions=positions)
    else:
        part = _zigzag(batch, rank, ranks, tokens)
    return replace(
        part, num_targets=int((part.targets != IGNORE).sum()), target_bytes=batch.target_bytes if rank == 0 else 0
    )


def part_tokens(batches: Sequence[Batch], ranks: int, multiple: int) -> int:
    """The tokens of a rank's part of the ring that are enough for each of these batches, and a multiple of `multiple`:
    sequence parallelism divides them, and a pipeline needs equal micro-batches."""
    sizes = [2 * sum(_chunk(begin, end, ranks) for begin, end in pairwise(b.cu_seqlens.tolist())) for b in batches]
    step = math.lcm(2, multiple)
    return -(-max(sizes) // step) * step


def _chunk(begin: int, end: int, ranks: int) -> int:
    """The length of a chunk of the document [begin, end): a 2 ranks-th of it, rounded up."""
    return -(-(end - begin) // (2 * ranks))


def _zigzag(batch: Batch, rank: int, ranks: int, tokens: int | None) -> Batch:
    """Chunks `rank` and 2 ranks - 1 - rank of the 2 ranks chunks of each document, then padding."""
    rows, padding, lengths = [], [], []
    for begin, end in pairwise(batch.cu_seqlens.tolist()):
        chunk = _chunk(begin, end, ranks)
        lengths.append(2 * chunk)
        for number in (rank, 2 * ranks - 1 - rank):
            at = torch.arange(begin + number * chunk, begin + (number + 1) * chunk)
            rows.append(at.clamp(max=end - 1))  # padding repeats the last token of the document, without a target
            padding.append(at >= end)
    longest, more = max(lengths), 0 if tokens is None else tokens - sum(lengths)
    lengths += [min(longest, more - done) for done in range(0, more, longest)]  # documents of padding
    rows.append(torch.full((more,), batch.num_tokens - 1))
    padding.append(torch.ones(more, dtype=torch.bool))
    row, padded = torch.cat(rows), torch.cat(padding)
    return replace(
        batch,
        ids=batch.ids[row],
        targets=batch.targets[row].masked_fill(padded, IGNORE),
        positions=batch.positions[row],
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(batch.cu_seqlens),
        max_len=longest,
        num_padding=batch.num_padding + int(padded.sum()),
    )
