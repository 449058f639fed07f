"""The paged KV cache: a pool of blocks a layer, and the view of it that one step attends through.

A sequence's positions live in the blocks of its table, in order: position p is place p % B of block table[p // B]. The
accounting is blocks.py's; here are the tensors. `PagedKV` satisfies `nn.kv.KV`; MLA's pool holds the latent as one key
head, and values are its first features.

Dims: N = blocks, B = positions of a block, G = key heads, D = features of a key, T = new tokens, S = sequences of a
step, P = blocks of the longest table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from bagu import ops
from bagu.nn.config import ModelConfig
from bagu.nn.kv import CacheError

__all__ = ["Batch", "PagedKV", "block_bytes"]


class Batch(NamedTuple):
    """One step on the device: where its tokens go and what they see."""

    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64: block * B + place
    cu_seqlens: torch.Tensor  # [S + 1] int32
    context_lens: torch.Tensor  # [S] int32: past and new
    block_tables: torch.Tensor  # [S, P] int32
    max_len: int  # most new tokens of a sequence
    max_context: int


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers."""
    heads, key, value = _widths(config)
    return config.num_layers * block_size * heads * (key + value) * dtype.itemsize


class PagedKV:
    """The pool. `load` says what the next forward is about; each layer then calls `attend` once."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not config.causal or config.attention == "linear":
            what = "linear attention" if config.causal else "a bidirectional model"
            raise CacheError(f"{what} has no KV cache", hint="serve a causal model with softmax attention")
        heads, key, value = _widths(config)
        layers = range(config.num_layers)
        shape = (num_blocks, block_size, heads)
        self.block_size = block_size
        self.keys = [torch.zeros(*shape, key, device=device, dtype=dtype) for _ in layers]
        self.values = [torch.zeros(*shape, value, device=device, dtype=dtype) for _ in layers] if value else None
        self.batch: Batch | None = None

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *(self.values or ())))

    @property
    def max_len(self) -> int:
        assert self.batch is not None, "PagedKV.load comes before a forward"
        return self.batch.max_context

    def load(self, batch: Batch) -> None:
        self.batch = batch

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers, in this order."""
        for source, destination in pairs:
            for pool in (*self.keys, *(self.values or ())):
                pool[destination] = pool[source]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        *,
        v_dim: int,
        scale: float,
        window: int | None,
        slopes: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        b, keys = self.batch, self.keys[layer]
        assert b is not None, "PagedKV.load comes before a forward"
        ops.kv_write(keys, k, b.slots)
        if v is None:
            values = keys[..., :v_dim]
        else:
            assert self.values is not None, "values for a pool of latents"
            values = self.values[layer]
            ops.kv_write(values, v, b.slots)
        out, _ = ops.paged_attention(
            q, keys, values, b.block_tables, b.cu_seqlens, b.context_lens, b.max_len, b.max_context,
            scale=scale, window=window, slopes=slopes, bias=bias,
        )  # fmt: skip
        return out


def _widths(config: ModelConfig) -> tuple[int, int, int]:
    """Key heads of the pool, features of a key, and of a value (0: values are a part of the keys)."""
    if config.mla is not None:
        return 1, config.mla.kv_rank + config.mla.rope_dim, 0
    return config.num_kv_heads, config.head_dim, config.head_dim
