"""The layers of a model as a decode step on a CPU wants them: weights with all that can be multiplied into them.

* The gain of a norm and its sqrt(size) are multiplied into the weight behind it, which leaves x / hypot(|x|, sqrt(size
  eps)).
* Queries, keys and values come out in three pieces, [q heads, k heads, v heads], and not by group as in the checkpoint:
  RoPE turns queries and keys in one pass over neighbours.

Dims: H = heads, G = key heads, n = H / G, D = features of a head.
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
from bagu.serve.cpu.packed import Pack, Packed, merged
from bagu.serve.kv.paged import PagedKV

__all__ = ["Layer", "Weights", "bits", "lay_out", "supports", "weights"]

Rows = tuple[torch.Tensor, torch.Tensor | None]  # a weight [out, in] and a bias


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


class Weights(NamedTuple):
    qkv: Rows
    out: Rows
    up: Rows  # gate and up where there is a gate
    down: Rows
    head_gain: torch.Tensor | None  # [H + G, D], of the QK norm
    window: int | None


class Layer(NamedTuple):
    """The same packed for products, and the pool as each of its readers wants it. N * B = places of the pool."""

    qkv: Packed
    out: Packed
    up: Packed
    down: Packed
    head_gain: torch.Tensor | None
    window: int | None
    keys: torch.Tensor  # [N * B, G, D]
    values: torch.Tensor
    key_bits: np.ndarray  # [N * B, G * D]: the same memory, for writing: a row is 0.3 to 1 us, `index_copy_` 2 to 6
    value_bits: np.ndarray
    key_heads: torch.Tensor  # [1, G, N * B, D]
    value_heads: torch.Tensor
    key_rows: torch.Tensor  # [D, N * B * G]
    value_rows: torch.Tensor  # [N * B * G, D]


def bits(x: torch.Tensor) -> np.ndarray:
    """The memory of a tensor as numpy sees it; bf16, which it has not, as int16."""
    array: np.ndarray = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
    return array


def lay_out(model: Transformer, kv: PagedKV, pack: Pack) -> list[Layer]:
    assert kv.values is not None
    each = zip(range(model.config.num_layers), kv.keys, kv.values, strict=True)
    return [_layer(weights(model, i), k.flatten(0, 1), v.flatten(0, 1), pack) for i, k, v in each]


def _layer(w: Weights, keys: torch.Tensor, values: torch.Tensor, pack: Pack) -> Layer:
    return Layer(
        qkv=pack(*w.qkv),
        out=pack(*w.out),
        up=pack(*w.up),
        down=pack(*w.down),
        head_gain=w.head_gain,
        window=w.window,
        keys=keys,
        values=values,
        key_bits=bits(keys.flatten(1)),
        value_bits=bits(values.flatten(1)),
        key_heads=keys.transpose(0, 1).unsqueeze(0),
        value_heads=values.transpose(0, 1).unsqueeze(0),
        key_rows=keys.flatten(0, 1).t(),
        value_rows=values.flatten(0, 1),
    )


def weights(model: Transformer, i: int) -> Weights:
    """Layer i of a model that is supported."""
    block, config = model.blocks[i], model.config
    assert isinstance(block, Block)
    attention, ffn = block.attention, block.ffn
    before, between = block.attention_norm, block.ffn_norm
    assert isinstance(attention, Attention) and isinstance(ffn, FFN)
    assert isinstance(before, RMSNorm) and isinstance(between, RMSNorm)
    root = math.sqrt(config.hidden_size)
    qkv, bias = merged(attention.qkv, before.weight.detach() * root), attention.qkv.bias
    up = ffn.gate_up if ffn.gated else ffn.up
    return Weights(
        qkv=(_by_kind(qkv, config), None if bias is None else _by_kind(bias.detach(), config)),
        out=(merged(attention.out), attention.out.bias),
        up=(merged(up, between.weight.detach() * root), up.bias),
        down=(merged(ffn.down), ffn.down.bias),
        head_gain=_head_gain(attention, config),
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
