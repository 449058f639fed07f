"""A decode step on a CPU: the model's layers as a flat list of torch calls, for one new token a sequence.

At 8M parameters `Transformer.forward` spends more time on module calls, argument checks and small passes than on
arithmetic. This is the same computation for the common kind of model (pre-norm, RMSNorm or none of the exotic
choices; `supports` says), with less of everything:

* weights are packed once (packed.py), and residual adds are part of the product before them;
* the gain of a norm and its sqrt(D) are multiplied into the weight behind it, which leaves x / hypot(|x|, sqrt(D eps)):
  three passes instead of seven;
* queries and keys of all heads are turned together, in place;
* what attention reads is worked out once a step and not once a layer.

Attention is that of ops/paged_attention/cpu.py: scores by `sampled_addmm` and sums by `embedding_bag`, which read rows
of the pool where they lie. `Transformer.forward` remains the definition: tests hold this to its logits.

Dims: S = sequences = new tokens, H = heads, G = key heads, n = H / G, D = features of a head, C = keys a token sees.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from bagu.nn.attention import Attention
from bagu.nn.block import Block
from bagu.nn.config import ModelConfig, NoPositions, Rope
from bagu.nn.ffn import FFN, activate
from bagu.nn.model import Transformer
from bagu.nn.norm import RMSNorm
from bagu.serve.packed import Pack, Packed, merged, pack
from bagu.serve.paged import Batch, PagedKV

__all__ = ["CpuDecode", "supports"]


def supports(config: ModelConfig) -> bool:
    """Whether a model is of the kind that this file computes; the others go through `Transformer.forward`."""
    rope = isinstance(config.positions, Rope) and config.positions.layout == "half"
    return (
        config.norm.kind == "rms"
        and config.norm.placement == "pre"
        and config.attention == "softmax"
        and config.mla is None
        and config.moe is None
        and (isinstance(config.positions, NoPositions) or (rope and config.rope_dim == config.head_dim))
        and not config.embedding_norm
        and not config.num_token_types
    )


class Layer(NamedTuple):
    qkv: Packed
    out: Packed
    up: Packed  # gate and up where there is a gate
    down: Packed
    head_gain: torch.Tensor | None  # [n + 1, D]: of the QK norm, query heads of a group and its key
    keys: torch.Tensor  # [N * B, G, D]
    values: torch.Tensor
    key_rows: torch.Tensor  # [D, N * B * G]
    value_rows: torch.Tensor  # [N * B * G, D]
    window: int | None


class Run(NamedTuple):
    """What one sequence sees, where its blocks lie in a row: places of the pool, read by SDPA without an index."""

    first: int
    length: int


class Gather(NamedTuple):
    """What the tokens of a step see, where the pool is of 16 bits, of which `sampled_addmm` knows nothing."""

    slots: torch.Tensor  # [S * C]
    unseen: torch.Tensor | None  # [S, 1, 1, C]: 0 or -inf


class Sight(NamedTuple):
    """What the tokens of a step see, through one window: row (s, h) of a sparse matrix has a column a key."""

    scores: torch.Tensor  # sparse [S * H, N * B * G]; its values are written anew by each layer
    columns: torch.Tensor  # [S * H * C] rows of the pool
    begins: torch.Tensor  # [S * H]
    unseen: torch.Tensor | None  # [S, 1, C] bool, where contexts differ in length


class CpuDecode:
    def __init__(self, model: Transformer, kv: PagedKV, pack: Pack = pack) -> None:
        config = model.config
        assert supports(config) and kv.values is not None
        self.pack = pack
        self.model, self.kv, self.config = model, kv, config
        self.scale, self.kind = config.scale, config.ffn
        self.table = model.embedding.weight.detach()
        self.floor = torch.tensor(math.sqrt(config.hidden_size * config.norm.eps))
        self.head_floor = torch.tensor(math.sqrt(config.head_dim * config.norm.eps))
        heads = torch.arange(config.num_heads, dtype=torch.int32) // config.group_size
        self.heads = heads.view(1, -1, 1)
        self.layers = [self._layer(i) for i in range(config.num_layers)]
        with warnings.catch_warnings():  # torch says once a process that CSR is beta; sampled_addmm is tested here
            warnings.simplefilter("ignore")
            torch.eye(1).to_sparse_csr()

    def _layer(self, i: int) -> Layer:
        block, config = self.model.blocks[i], self.config
        assert isinstance(block, Block)
        attention, ffn = block.attention, block.ffn
        before, between = block.attention_norm, block.ffn_norm
        assert isinstance(attention, Attention) and isinstance(ffn, FFN) and self.kv.values is not None
        assert isinstance(before, RMSNorm) and isinstance(between, RMSNorm)
        root = math.sqrt(config.hidden_size)
        keys, values = (p[i].flatten(0, 1) for p in (self.kv.keys, self.kv.values))
        up = ffn.gate_up if ffn.gated else ffn.up
        return Layer(
            qkv=self.pack(merged(attention.qkv, before.weight.detach() * root), attention.qkv.bias),
            out=self.pack(merged(attention.out), attention.out.bias),
            up=self.pack(merged(up, between.weight.detach() * root), up.bias),
            down=self.pack(merged(ffn.down), ffn.down.bias),
            head_gain=self._head_gain(attention),
            keys=keys,
            values=values,
            key_rows=keys.flatten(0, 1).t(),
            value_rows=values.flatten(0, 1),
            window=config.window(i),
        )

    def _head_gain(self, attention: Attention) -> torch.Tensor | None:
        q, k = attention.q_norm, attention.k_norm
        if not isinstance(q, RMSNorm) or not isinstance(k, RMSNorm):
            return None
        rows = [q.weight.detach()] * attention.group_size + [k.weight.detach()]
        return torch.stack(rows) * math.sqrt(self.config.head_dim)

    def __call__(self, batch: Batch) -> torch.Tensor:
        """The hidden state of each sequence's new token, [S, hidden_size], as `Transformer.forward` gives it."""
        turn = self._rotation(batch.positions)
        sights = {w: self._sight(batch, w) for w in {layer.window for layer in self.layers}}
        x = torch.embedding(self.table, batch.ids)
        for layer in self.layers:
            y = self._attend(layer, self._unit(x), batch.slots, turn, sights[layer.window])
            x = layer.out.add(x, y)
            x = layer.down.add(x, self._feed(layer.up(self._unit(x))))
        assert self.model.norm is not None
        hidden: torch.Tensor = self.model.norm(x)
        return hidden

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        """RMSNorm without its gain and without sqrt(D): both are in the weight behind it."""
        size = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        return (x / torch.hypot(size, self.floor, out=size)).to(x.dtype)

    def _feed(self, h: torch.Tensor) -> torch.Tensor:
        if self.kind != "swiglu":
            return activate(self.kind, h)
        gate, up = h.chunk(2, 1)
        return torch.nn.functional.silu(gate).mul_(up)

    def _attend(
        self, layer: Layer, h: torch.Tensor, slots: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor] | None,
        sight: Sight | Gather | Run,
    ) -> torch.Tensor:  # fmt: skip
        """[S, H * D]: what the tokens see, their own keys and values stored first."""
        S, n, G, D = h.shape[0], self.config.group_size, self.config.num_kv_heads, self.config.head_dim
        qkv = layer.qkv(h).view(S, G, n + 2, D)
        qk = qkv.narrow(2, 0, n + 1)
        if layer.head_gain is not None:
            size = torch.linalg.vector_norm(qk, 2, -1, True, dtype=torch.float32)
            qk.div_(torch.hypot(size, self.head_floor, out=size)).mul_(layer.head_gain)
        if turn is not None:  # (a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of a head
            cos, sin = turn
            swapped, wide = qk.roll(D // 2, -1), qk.float()  # in fp32 qk itself, else a copy
            wide.mul_(cos).addcmul_(swapped, sin)
            if wide is not qk:
                qk.copy_(wide)
        layer.keys.index_copy_(0, slots, qkv.select(2, n))
        layer.values.index_copy_(0, slots, qkv.select(2, n + 1))
        q = qkv.narrow(2, 0, n)
        if isinstance(sight, Run):  # the n queries of a group are n rows of one head
            shape, strides, first = (1, G, sight.length, D), (0, D, G * D, 1), sight.first * G * D
            k, v = (p.as_strided(shape, strides, first) for p in (layer.keys, layer.values))
            return sdpa(q, k, v, scale=self.scale).reshape(1, -1)
        if isinstance(sight, Gather):
            k, v = (p.index_select(0, sight.slots).view(S, -1, G, D) for p in (layer.keys, layer.values))
            y = sdpa(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=sight.unseen, scale=self.scale)
            return y.reshape(S, -1)
        q = q.reshape(-1, D)
        torch.sparse.sampled_addmm(sight.scores, q, layer.key_rows, beta=0.0, alpha=self.scale, out=sight.scores)
        s = sight.scores.values().view(S, G * n, -1)
        if sight.unseen is not None:  # not in place: the next layer's sum takes 0 times what is there
            s = s.masked_fill(sight.unseen, -torch.inf)
        p = torch.softmax(s, -1).view(-1)
        y = torch.embedding_bag(layer.value_rows, sight.columns, sight.begins, False, 0, False, p)[0]
        return y.view(S, -1)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """cos and sin of each token for both halves of a head, [S, 1, 1, D]; the sign of the first half in the sin."""
        signals = self.model.positions.signals(positions)
        if signals.cos is None or signals.sin is None:
            return None
        cos, sin = signals.cos, signals.sin
        shape = (len(positions), 1, 1, -1)
        return torch.cat((cos, cos), 1).view(shape), torch.cat((-sin, sin), 1).view(shape)

    def _sight(self, batch: Batch, window: int | None) -> Sight | Gather | Run:
        B, G, H, S = self.kv.block_size, self.config.num_kv_heads, self.config.num_heads, len(batch.ids)
        C = batch.max_context if window is None else min(window, batch.max_context)
        if S == 1 and (first := _run(batch, B, C)) is not None:
            return Run(first, C)
        lengths = batch.context_lens.unsqueeze(1)
        place = torch.arange(C, dtype=torch.int32) + (lengths - C).clamp_(min=0)  # a window ends at the last token
        inside = torch.minimum(place, lengths - 1)  # past the end: a key that is seen, so that no stale NaN is read
        slots = batch.block_tables.gather(1, (inside // B).long()) * B + inside % B
        ragged = S > 1 and bool((batch.context_lens < C).any())
        unseen = (place > lengths - 1).unsqueeze(1) if ragged else None
        if self.table.dtype != torch.float32:
            mask = None if unseen is None else torch.zeros(unseen.shape).masked_fill_(unseen, -torch.inf).unsqueeze(1)
            return Gather(slots.view(-1), None if mask is None else mask.to(self.table.dtype))
        columns = (slots.unsqueeze(1) * G + self.heads).view(-1)
        begins = torch.arange(0, S * H * C + 1, C, dtype=torch.int32)
        scores = torch.sparse_csr_tensor(
            begins, columns, torch.zeros(S * H * C, dtype=self.table.dtype),
            (S * H, self.layers[0].value_rows.shape[0]), check_invariants=False,
        )  # fmt: skip
        return Sight(scores, columns, begins[:-1], unseen)


def _run(batch: Batch, block_size: int, length: int) -> int | None:
    """The first of the last `length` places of a step's one sequence, if they lie in a row in the pool."""
    begin = batch.max_context - length
    blocks = batch.block_tables[0, begin // block_size :].tolist()
    if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
        return None
    return blocks[0] * block_size + begin % block_size
