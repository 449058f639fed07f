"""The layers of a model, laid out for decoding on a CPU: packed weights, and the pool as each of its readers wants it.

* The gain of a norm and its sqrt(size) are multiplied into the weight behind it, which leaves x / hypot(|x|, sqrt(size
  eps)).
* Queries, keys and values come out in three pieces, [q heads, k heads, v heads], and not by group as in the checkpoint:
  RoPE turns queries and keys in one pass over neighbours.
* Keys and values are written through numpy: a row assignment is 0.3 to 1 us, `index_copy_` 2 to 6.

Dims: H = heads, G = key heads, n = H / G, D = features of a head, N * B = places of the pool.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from bagu.nn.attention import Attention
from bagu.nn.block import Block
from bagu.nn.config import ModelConfig, NoPositions, Rope
from bagu.nn.ffn import FFN
from bagu.nn.model import Transformer
from bagu.nn.norm import RMSNorm
from bagu.serve.packed import Pack, Packed, merged
from bagu.serve.paged import PagedKV

__all__ = ["Layer", "bits", "lay_out", "supports"]


def supports(config: ModelConfig) -> bool:
    """Whether a model is of the kind that decode.py computes; the others go through `Transformer.forward`."""
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
    head_gain: torch.Tensor | None  # [H + G, D], of the QK norm
    keys: torch.Tensor  # [N * B, G, D]
    values: torch.Tensor
    key_bits: np.ndarray  # [N * B, G * D]: the same memory
    value_bits: np.ndarray
    key_heads: torch.Tensor  # [1, G, N * B, D]
    value_heads: torch.Tensor
    key_rows: torch.Tensor  # [D, N * B * G]
    value_rows: torch.Tensor  # [N * B * G, D]
    window: int | None


def lay_out(model: Transformer, kv: PagedKV, pack: Pack) -> list[Layer]:
    return [_layer(model, kv, pack, i) for i in range(model.config.num_layers)]


def bits(x: torch.Tensor) -> np.ndarray:
    """The memory of a tensor as numpy sees it; bf16, which it has not, as int16."""
    array: np.ndarray = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
    return array


def _layer(model: Transformer, kv: PagedKV, pack: Pack, i: int) -> Layer:
    block, config = model.blocks[i], model.config
    assert isinstance(block, Block)
    attention, ffn = block.attention, block.ffn
    before, between = block.attention_norm, block.ffn_norm
    assert isinstance(attention, Attention) and isinstance(ffn, FFN) and kv.values is not None
    assert isinstance(before, RMSNorm) and isinstance(between, RMSNorm)
    root = math.sqrt(config.hidden_size)
    qkv, bias = merged(attention.qkv, before.weight.detach() * root), attention.qkv.bias
    up = ffn.gate_up if ffn.gated else ffn.up
    keys, values = (p[i].flatten(0, 1) for p in (kv.keys, kv.values))
    return Layer(
        qkv=pack(_by_kind(qkv, config), None if bias is None else _by_kind(bias.detach(), config)),
        out=pack(merged(attention.out), attention.out.bias),
        up=pack(merged(up, between.weight.detach() * root), up.bias),
        down=pack(merged(ffn.down), ffn.down.bias),
        head_gain=_head_gain(attention, config),
        keys=keys,
        values=values,
        key_bits=bits(keys.flatten(1)),
        value_bits=bits(values.flatten(1)),
        key_heads=keys.transpose(0, 1).unsqueeze(0),
        value_heads=values.transpose(0, 1).unsqueeze(0),
        key_rows=keys.flatten(0, 1).t(),
        value_rows=values.flatten(0, 1),
        window=config.window(i),
    )


def _by_kind(rows: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Rows [G, n + 2, D] of queries, keys and values, brought into the order [q heads, k heads, v heads]."""
    n = config.group_size
    heads = rows.unflatten(0, (config.num_kv_heads, n + 2, config.head_dim))
    return torch.cat([part.flatten(0, 2) for part in heads.split((n, 1, 1), 1)])


def _head_gain(attention: Attention, config: ModelConfig) -> torch.Tensor | None:
    q, k = attention.q_norm, attention.k_norm
    if not isinstance(q, RMSNorm) or not isinstance(k, RMSNorm):
        return None
    rows = [q.weight.detach()] * config.num_heads + [k.weight.detach()] * config.num_kv_heads
    return torch.stack(rows) * math.sqrt(config.head_dim)
