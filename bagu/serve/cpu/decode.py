"""A decode step on a CPU in PyTorch: the model's layers as a flat list of calls, for one new token a sequence.

At 8M parameters `Transformer.forward` spends more time on module calls, argument checks and small passes than on
arithmetic. This is the same computation for the common kind of model (`layers.supports`), with less of everything:
weights are laid out once (layers.py), results go to buffers whose views are made once, residual adds are part of the
product before them, and what attention reads is worked out once a step and not once a layer. It serves where
compiled.py does not: no C++ compiler, another FFN than SwiGLU, another dtype. `Transformer.forward` remains the
definition: tests hold both to its logits.

Attention is that of ops/paged_attention/cpu.py: scores by `sampled_addmm` and sums by `embedding_bag`, which read rows
of the pool where they lie.

Dims: S = sequences = new tokens, H = heads, G = key heads, D = features of a head, C = keys a token sees, B = positions
of a block, N = blocks.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.nn.functional import silu

from bagu.nn.config import ModelConfig, Rope
from bagu.nn.ffn import activate
from bagu.nn.model import Transformer
from bagu.serve.cpu.layers import Layer, bits, lay_out
from bagu.serve.cpu.packed import Pack, pack, product
from bagu.serve.kv.paged import Batch, PagedKV

__all__ = ["CpuDecode"]

# The score of a key that is not seen; finite, since the next layer takes 0 times.
LOWEST = torch.finfo(torch.float32).min


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

    scores: torch.Tensor  # sparse [S * (H + G), N * B * G]; its values are written anew by each layer
    values: torch.Tensor  # [S, H, C]: those
    shares: torch.Tensor  # [S, H, C]: their softmax
    columns: torch.Tensor  # [S * H * C] rows of the pool
    begins: torch.Tensor  # [S * H]
    unseen: torch.Tensor | None  # [S, 1, C] bool, where contexts differ in length


class Buffers:
    """What a step of S sequences writes to, and the views of it that a layer needs."""

    def __init__(self, S: int, config: ModelConfig, up: int, dtype: torch.dtype) -> None:
        H, G, D = config.num_heads, config.num_kv_heads, config.head_dim
        wide = torch.promote_types(dtype, torch.float32)
        self.size = torch.empty(S, 1, dtype=wide)
        self.unit = torch.empty(S, config.hidden_size, dtype=dtype)
        self.qkv = torch.empty(S, (H + 2 * G) * D, dtype=dtype)
        self.up = torch.empty(S, up, dtype=dtype)
        self.gate, self.rest = self.up.chunk(2, 1)
        self.qk = self.qkv[:, : (H + G) * D].view(S, H + G, D)
        self.head_size = torch.empty(S, H + G, 1, dtype=wide)
        self.cos, self.sin = torch.empty(S, 1, D), torch.empty(S, 1, D // 2)
        self.wide = torch.empty(S, H + G, D, dtype=wide)
        self.turned = self.wide if wide == dtype else torch.empty(S, H + G, D, dtype=dtype)
        self.a, self.b = self.qk.chunk(2, -1)
        self.wide_a, self.wide_b = self.wide.chunk(2, -1)
        self.rows = self.turned.view(S * (H + G), D)
        self.q = self.turned[:, :H].unflatten(1, (G, H // G))  # the queries of a group are rows of one head
        self.k, self.v = bits(self.turned.view(S, -1)[:, H * D :]), bits(self.qkv[:, (H + G) * D :])
        # The matrix of scores has the keys among its rows, as memory has them: they see nothing.
        sees = torch.tensor([1] * H + [0] * G, dtype=torch.int32).repeat(S)
        self.row_ends = torch.cat((sees.new_zeros(1), sees.cumsum(0, dtype=torch.int32)))
        self.bags = torch.arange(S * H, dtype=torch.int32)


class CpuDecode:
    def __init__(self, model: Transformer, kv: PagedKV, pack: Pack = pack) -> None:
        config, self.kv, self.layers = model.config, kv, lay_out(model, kv, pack)
        assert model.norm is not None
        self.config, self.table = config, model.embedding.weight.detach()
        self.angles = model.positions.tables(self.table.device) if isinstance(config.positions, Rope) else None
        self.floor = torch.tensor(math.sqrt(config.hidden_size * config.norm.eps))
        self.head_floor = torch.tensor(math.sqrt(config.head_dim * config.norm.eps))
        self.gain = model.norm.weight.detach() * math.sqrt(config.hidden_size)
        self.windows = {layer.window for layer in self.layers}
        self.head_offsets = (np.arange(config.num_heads, dtype=np.int32) // config.group_size)[:, None]
        self.step_offsets = np.arange(kv.block_size, dtype=np.int32) * config.num_kv_heads
        self.buffers = self._buffers(1)
        with warnings.catch_warnings():  # torch says once a process that CSR is beta; sampled_addmm is tested here
            warnings.simplefilter("ignore")
            torch.eye(1).to_sparse_csr()

    def __call__(self, batch: Batch) -> torch.Tensor:
        """The hidden state of each sequence's new token, [S, hidden_size], as `Transformer.forward` gives it."""
        S, b = len(batch.ids), self.buffers
        if len(b.size) != S:
            b = self.buffers = self._buffers(S)
        if self.angles is not None:
            cos, sin = (t.index_select(0, batch.positions) for t in self.angles)
            b.cos.view(S, 2, -1).copy_(cos.unsqueeze(1))
            b.sin.copy_(sin.unsqueeze(1))
        sights, slots = {w: self._sight(batch, w) for w in self.windows}, batch.slots.numpy()
        x = torch.embedding(self.table, batch.ids)
        for layer in self.layers:
            product(layer.qkv, self._unit(x), b.qkv)
            x = layer.out.add(x, self._attend(layer, slots, sights[layer.window]))
            product(layer.up, self._unit(x), b.up)
            x = layer.down.add(x, self._feed())
        return self._unit(x) * self.gain

    def _buffers(self, S: int) -> Buffers:
        gated = 2 if self.config.gated else 1
        return Buffers(S, self.config, gated * self.config.intermediate_size, self.table.dtype)

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        """RMSNorm without its gain and without sqrt(D): both are in the weight behind it."""
        b = self.buffers
        size = torch.linalg.vector_norm(x, 2, -1, True, dtype=b.size.dtype, out=b.size)
        return torch.div(x, torch.hypot(size, self.floor, out=size), out=b.unit)

    def _feed(self) -> torch.Tensor:
        b = self.buffers
        return (
            silu(b.gate, inplace=True).mul_(b.rest) if self.config.ffn == "swiglu" else activate(self.config.ffn, b.up)
        )

    def _turn(self, layer: Layer) -> None:
        """QK norm and RoPE, from `qk` to `turned`."""
        b = self.buffers
        if layer.head_gain is not None:
            size = torch.linalg.vector_norm(b.qk, 2, -1, True, dtype=b.head_size.dtype, out=b.head_size)
            b.qk.div_(torch.hypot(size, self.head_floor, out=size)).mul_(layer.head_gain)
        if self.angles is None:
            b.wide.copy_(b.qk)
        else:  # (a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of a head
            torch.mul(b.qk, b.cos, out=b.wide)
            b.wide_a.addcmul_(b.b, b.sin, value=-1)
            b.wide_b.addcmul_(b.a, b.sin)
        if b.turned is not b.wide:
            b.turned.copy_(b.wide)

    def _attend(self, layer: Layer, slots: np.ndarray, sight: Sight | Gather | Run) -> torch.Tensor:
        """[S, H * D]: what the tokens see, their own keys and values stored first."""
        b, S, scale = self.buffers, len(slots), self.config.scale
        self._turn(layer)
        layer.key_bits[slots], layer.value_bits[slots] = b.k, b.v
        if isinstance(sight, Run):
            k, v = (p.narrow(2, *sight) for p in (layer.key_heads, layer.value_heads))
            return sdpa(b.q, k, v, scale=scale).view(1, -1)
        if isinstance(sight, Gather):
            k, v = (p.index_select(0, sight.slots).unflatten(0, (S, -1)) for p in (layer.keys, layer.values))
            y = sdpa(b.q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=sight.unseen, scale=scale)
            return y.reshape(S, -1)
        scores, values, shares, columns, begins, unseen = sight
        torch.sparse.sampled_addmm(scores, b.rows, layer.key_rows, beta=0.0, alpha=scale, out=scores)
        if unseen is not None:
            values.masked_fill_(unseen, LOWEST)
        torch.softmax(values, -1, out=shares)
        y = torch.embedding_bag(layer.value_rows, columns, begins, False, 0, False, shares.view(-1))[0]
        return y.view(S, -1)

    def _sight(self, batch: Batch, window: int | None) -> Sight | Gather | Run:
        B, G, H, S = self.kv.block_size, self.config.num_kv_heads, self.config.num_heads, len(batch.ids)
        C = batch.max_context if window is None else min(window, batch.max_context)
        if S == 1 and (first := _run(batch, B, C)) is not None:
            return Run(first, C)
        lengths = batch.context_lens.numpy()[:, None]
        starts = (batch.block_tables.numpy() * np.int32(B * G))[:, :, None]
        heads = (starts + self.step_offsets).reshape(S, -1)  # head 0 of each place
        if window is None:
            heads = heads[:, :C]
        else:  # a window ends at the last token
            last = np.minimum(np.arange(C, dtype=np.int32) + np.maximum(lengths - C, 0), lengths - 1)
            heads = np.take_along_axis(heads, last, 1)
        unseen = np.arange(C, dtype=np.int32) >= lengths
        ragged = bool(unseen.any())
        if ragged:  # past the end: a key that is seen, so that no stale NaN is read
            heads = np.where(unseen, heads[:, :1], heads)
        if self.table.dtype != torch.float32:
            return Gather(torch.from_numpy((heads // G).reshape(-1)), self._mask(unseen) if ragged else None)
        columns = torch.from_numpy((heads[:, None] + self.head_offsets).reshape(-1))
        scores = torch.sparse_csr_tensor(
            self.buffers.row_ends * C, columns, torch.zeros(S * H * C),
            (len(self.buffers.rows), self.layers[0].value_rows.shape[0]), check_invariants=False,
        )  # fmt: skip
        values = scores.values().view(S, H, C)
        hidden = torch.from_numpy(unseen).unsqueeze(1) if ragged else None
        return Sight(scores, values, torch.empty_like(values), columns, self.buffers.bags * C, hidden)

    def _mask(self, unseen: np.ndarray) -> torch.Tensor:
        mask = torch.zeros(unseen.shape, dtype=self.table.dtype).masked_fill_(torch.from_numpy(unseen), -torch.inf)
        return mask[:, None, None]


def _run(batch: Batch, block_size: int, length: int) -> int | None:
    """The first of the last `length` places of a step's one sequence, if they lie in a row in the pool."""
    begin = batch.max_context - length
    blocks = batch.block_tables[0, begin // block_size :].tolist()
    if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
        return None
    return blocks[0] * block_size + begin % block_size
