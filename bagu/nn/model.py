"""The Transformer: embedding, blocks, norm. Tokens are packed, [T] instead of [batch, time]: see bagu.types.Batch.

The head is separate (`head_weight`), because training fuses it with the loss and never computes the logits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Unpack

import torch
from torch import nn
from torch.nn import functional as F

from bagu import ops
from bagu.errors import ArgumentError
from bagu.nn.attention import Context, Softmax
from bagu.nn.block import Block, expected_size
from bagu.nn.change import with_modules
from bagu.nn.config import ModelConfig
from bagu.nn.ffn import activate
from bagu.nn.kv import KV
from bagu.nn.linear import Factory, Linear, parameter
from bagu.nn.moe import MoE
from bagu.nn.norm import make_norm
from bagu.nn.positions import make_encoding


class Placed(NamedTuple):
    """Vectors that take the place of some tokens' embeddings: patches of an image."""

    rows: torch.Tensor  # [N] int64: which of the T tokens
    vectors: torch.Tensor  # [N, D]


class Output(NamedTuple):
    hidden: torch.Tensor  # [T, D]: the input of the head, after the last norm
    aux_loss: torch.Tensor | None  # [] fp32: to add to the loss; the sum over layers with a load-balancing loss
    expert_load: tuple[torch.Tensor, ...]  # [E] int64 per layer with experts, for `update_balance`


class Embedding(nn.Module):
    """A table of vectors, also used as the weight of the head."""

    def __init__(self, rows: int, size: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.weight = parameter(rows, size, **factory)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


@functools.cache
def _rounded(factor: float, dtype: torch.dtype) -> float:
    """The factor of the embedding in the model's dtype, as Gemma was trained."""
    return torch.tensor(factor, dtype=dtype).item()


class MLMHead(nn.Module):
    """BERT's head: dense, GELU, norm. The bias of the head is a weight on a constant feature of 1, so that loss and
    logits remain one product of two tensors. Eight features are added, not one, because kernels read rows by 16
    bytes."""

    def __init__(self, config: ModelConfig, **factory: Unpack[Factory]) -> None:
        super().__init__()
        D = config.hidden_size
        self.dense = Linear(D, D, bias=True, **factory)
        self.norm = make_norm(config.norm, D, **factory)
        self.bias = parameter(config.vocab_size, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(activate("gelu", self.dense(x)))
        return torch.cat((x, x.new_ones(x.shape[0], 1), x.new_zeros(x.shape[0], 7)), 1)

    def weight(self, table: torch.Tensor) -> torch.Tensor:
        return torch.cat((table, self.bias.unsqueeze(1), table.new_zeros(len(table), 7)), 1)


class ScoreHead(nn.Module):
    """A linear map of the hidden state to one number, in fp32 also for a bf16 model: 8 bits would tie close scores.

    Not a `Linear`, so that LoRA does not adapt it: one row is trained whole.
    """

    def __init__(self, size: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.weight = parameter(1, size, **factory)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T] fp32."""
        acc = torch.promote_types(hidden.dtype, torch.float32)
        return ops.matmul(hidden.to(acc), self.weight.to(acc)).squeeze(-1)  # the op has the batch-invariant mode


class Transformer(nn.Module):
    """`init_weights` initializes its weights, nn/weights.py loads them; until then they are NaN."""

    def __init__(self, config: ModelConfig, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.config = config
        self.family: str | None = None  # the model_type of the checkpoint it was loaded from
        V, D = config.vocab_size, config.hidden_size
        self.embedding = Embedding(V, D, **factory)
        self.positions = make_encoding(config, **factory)
        self.token_types = Embedding(config.num_token_types, D, **factory) if config.num_token_types else None
        self.embedding_norm = make_norm(config.norm, D, **factory) if config.embedding_norm else None
        self.blocks = nn.ModuleList(Block(config, i, **factory) for i in range(config.num_layers))
        self.norm = make_norm(config.norm, D, **factory) if config.final_norm else None
        self.mlm = MLMHead(config, **factory) if config.mlm_head else None
        self.score = ScoreHead(D, **factory) if config.score_head else None
        self.head = Embedding(V, D, **factory) if config.untied_head else None

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_len: int,
        kv: KV | None = None,
        *,
        token_types: torch.Tensor | None = None,
        placed: Placed | None = None,
    ) -> Output:
        """Return the hidden state of each of T tokens.

        `placed` has vectors for tokens that are no words; their `ids` are not used. `positions[T]` are positions in the
        sequence, `cu_seqlens[S + 1]` the offsets of segments, `max_len` a host bound on their length. With a KV view
        the tokens are the new tokens of its sequences, and `positions` continue after the past.
        """
        self._check(max_len, kv)
        x = self._embed(ids, positions, token_types, placed)
        longest = max_len if kv is None else self.config.max_len  # cached keys keep the factors of LongRoPE
        context = Context(cu_seqlens, max_len, self.positions.signals(positions, longest), kv)
        delta, routings = None, []
        for block in self.blocks:
            x, delta, routing = block(x, delta, context)
            if routing is not None:
                routings.append(routing)
        losses = [r.aux_loss for r in routings if r.aux_loss is not None]
        aux_loss = torch.stack(losses).sum() if losses else None
        return Output(self._finish(x, delta), aux_loss, tuple(r.load for r in routings))

    def for_length(self, max_len: int | None) -> Transformer:
        """The model for sequences of at most `max_len` in a KV cache, with the same weights. It is another one only for
        LongRoPE, whose short factors are used if they suffice."""
        if max_len is None or max_len >= self.config.max_len or self.config.longrope is None:
            return self
        config = replace(self.config, max_len=max_len)
        model = with_modules(self, lambda name, module: make_encoding(config) if name == "positions" else None)
        model.config = config
        return model

    def with_attention(self, config: ModelConfig) -> Transformer:
        """The model with the same weights and the attention of `config`: other windows, or blocks instead of all."""
        model = with_modules(self, lambda _, m: Softmax(config, m.layer) if isinstance(m, Softmax) else None)
        model.config = config
        return model

    def _check(self, max_len: int, kv: KV | None) -> None:
        """Compare lengths on the host; the positions themselves are not read from the device."""
        longest = max_len if kv is None else kv.max_len  # past plus new
        if longest > self.config.max_len:
            raise ArgumentError(
                f"a sequence has {longest} tokens, but the model has positions for {self.config.max_len}",
                hint="shorten it, or create the model with a larger max_len",
            )
        if kv is not None and self.training and self.config.norm.kind == "batch":
            raise ArgumentError(
                "a KV view with batch norm in training mode: its statistics would cover the new tokens only",
                hint="call model.eval() first",
            )

    def _embed(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
        placed: Placed | None = None,
    ) -> torch.Tensor:
        x: torch.Tensor = self.embedding(ids)
        if self.config.norm.placement == "none":
            x = x / self.config.init_std  # the stream starts at standard deviation 1, as expected_size assumes
        if self.config.multipliers.embedding != 1.0:
            x = x * _rounded(self.config.multipliers.embedding, x.dtype)
        if placed is not None:
            x = x.index_copy(0, placed.rows, placed.vectors.to(x.dtype))
        if self.token_types is not None:
            x = x + self.token_types(torch.zeros_like(ids) if token_types is None else token_types)
        elif token_types is not None:
            raise ArgumentError("the model has no token types", hint="set num_token_types, or leave token_types out")
        x = self.positions.embed(x, self.positions.skip_padding(ids, positions))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x

    def _finish(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        if self.norm is not None:
            x, _ = self.norm.add(delta, x)
        elif self.config.norm.alpha is not None:
            x = x / expected_size(self.config.norm.alpha, 2 * self.config.num_layers)
        if self.config.multipliers.logits_divisor != 1.0 and self.score is None:
            x = x / self.config.multipliers.logits_divisor  # the logits are linear in x
        return x if self.mlm is None else self.mlm(x)

    @property
    def head_weight(self) -> torch.Tensor:
        """[V, D] (D as in `Output.hidden`): the weight that the loss uses with the hidden states."""
        if self.score is not None:
            raise ArgumentError("the model has a score head and no logits", hint="use model.score(hidden)")
        if not self.config.lm_head:
            raise ArgumentError("the model has no head, and so no logits", hint="use its hidden states")
        table = self.embedding.weight if self.head is None else self.head.weight
        return table if self.mlm is None else self.mlm.weight(table)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, V]."""
        return ops.matmul(hidden, self.head_weight)

    def update_balance(self, expert_load: Sequence[torch.Tensor]) -> None:
        """Update the aux-free balancing biases with the summed `expert_load` of all micro-batches of a step."""
        layers = [m for m in self.blocks.modules() if isinstance(m, MoE)]  # not those of a critic
        for layer, load in zip(layers, expert_load, strict=True):
            if layer.moe.bias_rate is not None:
                layer.update_balance(load)
