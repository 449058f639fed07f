"""The paged KV cache: one pool of blocks per layer, and the attention of a step over it.

The positions of a sequence are stored in the blocks of its table, in order: position p is slot p % B of block
table[p // B]. Groups of layers have tables of their own (groups.py), and share the tensors: layer i of every group
stores its keys in tensor i, each group in its own blocks. blocks.py allocates the blocks; this file has the tensors.
`PagedKV` satisfies `nn.kv.KV`. With MLA the pool holds the latent as one key head, and the values are its first
features.

Dims: N = blocks, B = positions per block, G = key heads, D = features of a key, T = new tokens, S = sequences of a
step, P = blocks of the longest table, R = groups of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from bagu import ops
from bagu.nn.config import ModelConfig
from bagu.nn.kv import CacheError, HeadTransform, Scores
from bagu.serve.kv.groups import LayerGroup, group_layers, whole
from bagu.serve.kv.sparse import attend_chosen, join, owners, write_means
from bagu.serve.plan import SHORT

MEANS_BYTES = 64 << 20  # of keys that are gathered at once for their means
EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
FP32 = torch.float32


def cache_dtype(kv_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of keys and values for the engine's option `kv_dtype`."""
    return EIGHT_BITS.get(kv_dtype, model_dtype)


class Batch(NamedTuple):
    """The tensors of one step: its tokens, their slots in the pool, and the block tables to attend to."""

    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: tuple[torch.Tensor, ...]  # R times [T] int64: block * B + position within the block
    cu_seqlens: torch.Tensor  # [S + 1] int32
    context_lens: torch.Tensor  # [S] int32: past and new tokens
    block_tables: tuple[torch.Tensor, ...]  # R times [S, P] int32
    max_len: int  # most new tokens of a sequence
    max_context: int
    num_decodes: int  # number of leading sequences with one new token each
    decode_context: int  # max_context of the decodes
    # [T] int64: slots of LoRA adapters (adapters/layers.py); None: no token has one
    adapters: torch.Tensor | None = None

    def parts(self) -> list[Part]:
        """Split the sequences into attention calls. On a GPU decodes and prompts run different kernels, so they are
        separate calls; on a CPU the op separates them itself."""
        n, S, T = self.num_decodes, len(self.context_lens), len(self.ids)
        if not self.ids.is_cuda or n in (0, S):
            return [
                Part(slice(0, T), self.block_tables, self.cu_seqlens, self.context_lens, self.max_len, self.max_context)
            ]
        offsets, lengths, tables = self.cu_seqlens, self.context_lens, self.block_tables
        return [
            Part(slice(0, n), tuple(t[:n] for t in tables), offsets[: n + 1], lengths[:n], 1, self.decode_context),
            Part(
                slice(n, T), tuple(t[n:] for t in tables), offsets[n:] - n, lengths[n:], self.max_len, self.max_context
            ),
        ]


class Part(NamedTuple):
    """Some sequences of a batch, as `ops.paged_attention` takes them."""

    tokens: slice  # of T
    block_tables: tuple[torch.Tensor, ...]  # of each group
    cu_seqlens: torch.Tensor
    context_lens: torch.Tensor
    max_len: int
    max_context: int


class LayerCache(NamedTuple):
    """The cache of one layer. The first two dims of each tensor are the blocks and the positions of a block."""

    keys: torch.Tensor  # [N, B, G, D]
    values: torch.Tensor | None = None  # [N, B, G, E]; None with MLA: the values are the first features of the keys
    key_scales: torch.Tensor | None = None  # [N, B, G] fp32, of an 8-bit cache
    value_scales: torch.Tensor | None = None
    means: torch.Tensor | None = None  # [N, G, D]: the mean keys of full blocks, with attention "blocks"

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for t in self if t is not None]


class CacheTensor(NamedTuple):
    """One tensor of a layer's cache: the shape of one position, and the dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def position_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def zeros(self, num_blocks: int, block_size: int, device: torch.device | str | None) -> torch.Tensor:
        """[N, B, *shape]. Scales are [N, G, B] in memory: a kernel reads the scales of one head at a time."""
        if len(self.shape) == 1:
            return torch.zeros(num_blocks, *self.shape, block_size, device=device, dtype=self.dtype).transpose(1, 2)
        return torch.zeros(num_blocks, block_size, *self.shape, device=device, dtype=self.dtype)


def cache_tensors(config: ModelConfig, dtype: torch.dtype) -> Mapping[str, CacheTensor]:
    """The tensors that every layer of a cache in `dtype` has, by their names in `LayerCache`."""
    if config.mla is not None:
        if dtype in EIGHT_BITS.values():
            raise CacheError("the latent cache of an MLA model has no 8-bit form", hint="use kv_dtype=auto")
        return {"keys": CacheTensor((1, config.mla.kv_rank + config.mla.rope_dim), dtype)}
    head, scale = CacheTensor((config.num_kv_heads, config.head_dim), dtype), CacheTensor((config.num_kv_heads,), FP32)
    scales = {"key_scales": scale, "value_scales": scale} if dtype in EIGHT_BITS.values() else {}
    return {"keys": head, "values": head, **scales}


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype, *, num_layers: int | None = None) -> int:
    """Bytes of one block for `num_layers` layers; None: all of the model."""
    layers = config.num_layers if num_layers is None else num_layers
    means = means_tensor(config, dtype)
    each = block_size * sum(t.position_bytes for t in cache_tensors(config, dtype).values())
    return layers * (each + (0 if means is None else means.position_bytes))


def means_tensor(config: ModelConfig, dtype: torch.dtype) -> CacheTensor | None:
    """The mean keys of a block; None unless queries choose blocks by them."""
    if config.attention != "blocks":
        return None
    return CacheTensor((config.num_kv_heads, config.head_dim), FP32 if dtype in EIGHT_BITS.values() else dtype)


class PagedKV:
    """The KV pool of all layers. `load` sets the batch of the next forward; each layer then calls `attend` once."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        groups: Sequence[LayerGroup] | None = None,
    ) -> None:
        """`groups` None: one of all layers."""
        if not config.causal or config.attention == "linear":
            found = "linear attention" if config.causal else "a bidirectional model"
            raise CacheError(f"{found} has no KV cache", hint="use a causal model with softmax attention")
        self.choice = config.blocks if config.attention == "blocks" else None
        if self.choice is not None and block_size != self.choice.size:
            raise CacheError(
                f"KV blocks of {block_size} positions, and the model chooses blocks of {self.choice.size}",
                hint=f"use block_size = {self.choice.size}",
            )
        self.num_blocks, self.block_size = num_blocks, block_size
        dtype = torch.get_default_dtype() if dtype is None else dtype
        tensors, means = cache_tensors(config, dtype), means_tensor(config, dtype)
        self.groups = whole(config.num_layers) if groups is None else tuple(groups)
        blocks = num_blocks * group_layers(self.groups)
        parts = {name: t.zeros(blocks, block_size, device) for name, t in tensors.items()}
        if means is not None:
            parts["means"] = torch.zeros(blocks, *means.shape, device=device, dtype=means.dtype)
        self.whole = LayerCache(**parts)  # block n of layer i is block i * num_blocks + n
        views = zip(*(t.split(num_blocks) for t in parts.values()), strict=True)
        self.pool = [LayerCache(**dict(zip(parts, of, strict=True))) for of in views]
        places = {layer: (g, i) for g, group in enumerate(self.groups) for i, layer in enumerate(group.layers)}
        self.group_of = [places[layer][0] for layer in range(config.num_layers)]
        self.layers = [self.pool[places[layer][1]] for layer in range(config.num_layers)]
        self.batch: Batch | None = None
        self.parts: list[Part] = []
        self.filled: list[torch.Tensor] | None = None  # the blocks whose means change; None: those of all new tokens
        self.defers = False  # means are written after the last layer, not in each layer

    @property
    def quantized(self) -> bool:
        return self.layers[0].key_scales is not None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the pool."""
        return [t for layer in self.pool for t in layer.tensors]

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def max_len(self) -> int:
        assert self.batch is not None, "call PagedKV.load before a forward"
        return self.batch.max_context

    def load(self, batch: Batch) -> None:
        self.batch, self.parts, self.filled = batch, batch.parts(), None
        if self.choice is None:
            return
        # a block that a short step fills is its own or the one before, which no token chooses by its mean
        self.defers = batch.max_len == 1 or (batch.max_len <= min(SHORT, self.block_size) and self.choice.near > 0)
        if batch.max_len > SHORT:  # a graph has short steps, and reads the slots itself
            last = batch.positions % self.block_size == self.block_size - 1
            self.filled = [slots[last] // self.block_size for slots in batch.slots]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers of their group, in this order."""
        for source, destination in pairs:
            for pool in self.tensors:
                pool[destination] = pool[source]

    def write(self, layer: int, qkv: torch.Tensor, transform: HeadTransform) -> torch.Tensor:
        b, cache = self.batch, self.layers[layer]
        assert b is not None, "call PagedKV.load before a forward"
        assert cache.values is not None, "an MLA cache stores no values"
        return ops.rope_kv_write(
            qkv,
            b.slots[self.group_of[layer]],
            cache.keys,
            cache.values,
            k_scale=cache.key_scales,
            v_scale=cache.value_scales,
            **transform._asdict(),
        )

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, v_dim: int, scores: Scores
    ) -> torch.Tensor:
        b, (keys, values, key_scales, value_scales, means), g = self.batch, self.layers[layer], self.group_of[layer]
        assert b is not None, "call PagedKV.load before a forward"
        if k is not None:
            ops.kv_write(keys, k, b.slots[g], scale=key_scales)
        if v is not None:
            assert values is not None, "an MLA cache stores no values"
            ops.kv_write(values, v, b.slots[g], scale=value_scales)
        if values is None:  # MLA: a latent per token
            extra = (scores.slopes, scores.bias, scores.sinks)
            assert all(x is None for x in extra), "ModelConfig requires RoPE for MLA, and no sinks"
            outs = [
                ops.mla_attention(
                    q[p.tokens], keys.squeeze(2), p.block_tables[g], p.cu_seqlens, p.context_lens, v_dim, p.max_len,
                    p.max_context, scale=scores.scale, window=scores.window,
                )[0]
                for p in self.parts
            ]  # fmt: skip
        elif self.choice is not None and means is not None:
            if layer == self.groups[g].layers[0]:  # once a forward, and in the CUDA graph if one is captured
                self.pages = b.slots[g] // self.block_size if self.filled is None else self.filled[g]
                self.count = torch.arange(len(q) * keys.shape[2] + 1, device=q.device, dtype=torch.int32)
            if not self.defers:
                write_means(means, keys, key_scales, self.pages)
            elif layer == self.groups[g].layers[-1]:
                self._write_all_means(self.pages)
            outs = [
                attend_chosen(
                    q[p.tokens], keys, values, means, p.block_tables[g], p.cu_seqlens, p.context_lens, p.max_len,
                    p.max_context, self.count, self.choice, scores.scale, (key_scales, value_scales),
                )
                for p in self.parts
            ]  # fmt: skip
        elif self.groups[g].first:
            outs = [self._attend_with_first(p, g, q[p.tokens], self.layers[layer], scores) for p in self.parts]
        else:
            outs = [
                ops.paged_attention(
                    q[p.tokens], keys, values, p.block_tables[g], p.cu_seqlens, p.context_lens, p.max_len,
                    p.max_context, k_scale=key_scales, v_scale=value_scales, **scores._asdict(),
                )[0]
                for p in self.parts
            ]  # fmt: skip
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _write_all_means(self, pages: torch.Tensor) -> None:
        """Write the mean keys of these pages in all layers: few kernels a step instead of three a layer."""
        keys, means = self.whole.keys, self.whole.means
        assert means is not None
        first = torch.arange(0, len(keys), self.num_blocks, device=pages.device, dtype=pages.dtype)
        rows = first.unsqueeze(1).add(pages).flatten()
        for some in rows.split(max(MEANS_BYTES // keys[0].nbytes, 1)):
            write_means(means, keys, self.whole.key_scales, some)

    def _attend_with_first(
        self, part: Part, group: int, q: torch.Tensor, cache: LayerCache, scores: Scores
    ) -> torch.Tensor:
        """Attention to the window and to the first positions, which are before it: two calls, joined by their sums.
        In the second each token is a sequence of its own, of the first positions that its window does not reach."""
        assert cache.values is not None and scores.window is not None, "build.py refuses other models"
        kept, b = self.groups[group], self.batch
        assert b is not None
        scales: dict[str, Any] = {"k_scale": cache.key_scales, "v_scale": cache.value_scales}
        near, near_lse = ops.paged_attention(
            q, cache.keys, cache.values, part.block_tables[group], part.cu_seqlens, part.context_lens, part.max_len,
            part.max_context, **scales, **scores._asdict(),
        )  # fmt: skip
        columns = min(-(-kept.first // self.block_size), part.block_tables[group].shape[1])
        hidden = b.positions[part.tokens] - scores.window + 1  # positions before the window
        lengths = hidden.clamp(1, min(kept.first, columns * self.block_size))
        first, first_lse = ops.paged_attention(
            q,
            cache.keys,
            cache.values,
            part.block_tables[group][owners(part.cu_seqlens, len(q)), :columns],
            torch.arange(len(q) + 1, device=q.device, dtype=torch.int32),
            lengths.to(torch.int32),
            1,
            columns * self.block_size,
            **scales,
            **scores._replace(window=None, sinks=None)._asdict(),
        )
        first_lse = first_lse.masked_fill((hidden < 1).unsqueeze(1), -torch.inf)
        return join((near, first), (near_lse, first_lse))
