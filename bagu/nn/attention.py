"""Attention over packed tokens: MHA, GQA and MQA by the head counts; softmax or linear.

One weight computes queries, keys and values. Its rows are ordered by KV group: [q heads of group 0 …, k 0, v 0, q heads
of group 1 …], so that a range of complete groups is a shard.

Dims: T = tokens, H = heads, G = KV heads, n = H / G, D = head dim.
"""

from typing import Any, NamedTuple, Unpack

import torch
from torch import nn

from bagu import ops
from bagu.nn.choices import BlockChoice
from bagu.nn.config import ModelConfig, Rope
from bagu.nn.kv import KV, HeadTransform, Scores
from bagu.nn.linear import Factory, Linear, parameter
from bagu.nn.norm import RMSNorm
from bagu.nn.positions import Signals
from bagu.ops.choose_blocks.means import packed_means


class Context(NamedTuple):
    """The inputs that all layers of one forward share."""

    cu_seqlens: torch.Tensor  # [S + 1] int32
    max_len: int
    signals: Signals
    kv: KV | None


class Softmax(nn.Module):
    """Softmax attention of q[T, H, D] to k[T, G, D] and v[T, G, E] in each segment, or to the past in the KV view.
    `sinks[H]` are added to the denominators."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.window = layer, config.window(layer)
        self.scale, self.causal = config.scale, config.causal
        self.blocks = config.blocks if config.attention == "blocks" else None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, *, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        cu_seqlens, max_len, signals, kv = context
        if kv is not None:
            return self.cached(kv, q, k, v, v.shape[-1], signals, sinks=sinks)
        if self.blocks is not None and max_len > self.blocks.dense_below:
            return self.sparse(self.blocks, q, k, v, cu_seqlens, max_len)
        out, _ = ops.attention(
            q, k, v, cu_seqlens, max_len,
            causal=self.causal, window=self.window, scale=self.scale, slopes=signals.slopes, bias=signals.bias,
            sinks=sinks,
        )  # fmt: skip
        return out

    def sparse(
        self, of: BlockChoice, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int
    ) -> torch.Tensor:
        """Attention to the blocks that each query chooses."""
        means, tables = packed_means(k, cu_seqlens, max_len, of.size)
        blocks, _ = ops.choose_blocks(
            q.detach(), means, tables, cu_seqlens, cu_seqlens.diff(), max_len, max_len, size=of.size, top=of.top,
            near=of.near, dense_below=of.dense_below,
        )  # fmt: skip
        out, _ = ops.block_attention(
            q, k, v, blocks, cu_seqlens, max_len, size=of.size, near=of.near, dense_below=of.dense_below,
            scale=self.scale,
        )  # fmt: skip
        return out

    def cached(
        self,
        kv: KV,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        v_dim: int,
        signals: Signals,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scores = Scores(self.scale, self.window, signals.slopes, signals.bias, sinks)
        return kv.attend(self.layer, q, k, v, v_dim, scores)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        H, G, D, wn = config.num_heads, config.num_kv_heads, config.head_dim, config.weight_norm
        self.num_groups, self.group_size, self.head_dim = G, H // G, D
        self.qkv = Linear(config.hidden_size, (H + 2 * G) * D, bias=config.qkv_bias, weight_norm=wn, **factory)
        self.out = Linear(H * D, config.hidden_size, bias=config.out_bias, weight_norm=wn, **factory)
        self.norm_width = config.qk_norm == "width"
        sizes = (H * D, G * D) if self.norm_width else (D, D)
        norm: dict[str, Any] = {"unit_offset": config.norm.unit_offset, **factory}
        self.q_norm, self.k_norm = (
            RMSNorm(size, config.norm.eps, **norm) if config.qk_norm else None for size in sizes
        )
        self.sinks = parameter(H, **factory) if config.sinks else None
        self.other_positions = config.has_other_positions(layer)
        self.layout = config.positions.layout if isinstance(config.positions, Rope) else "half"
        self.softmax = None if config.attention == "linear" else Softmax(config, layer)
        self.causal = config.causal

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        T, G, n, D = x.shape[0], self.num_groups, self.group_size, self.head_dim
        if self.other_positions:
            assert context.signals.other is not None, "RopeEncoding returns them"
            context = context._replace(signals=context.signals.other)
        qkv = self.qkv(x).view(T, G, n + 2, D)
        if context.kv is not None and self.softmax is not None:
            return self.out(self.cached(self.softmax, context.kv, qkv, context.signals).flatten(1))
        q, k, v = qkv.split((n, 1, 1), 2)
        k, v = k.squeeze(2), v.squeeze(2)
        if G == 1 or n == 1:
            q = q.view(T, G * n, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.normed(q, self.q_norm), self.normed(k, self.k_norm)
        elif context.signals.cos is not None:
            v = v.contiguous()  # attention saves v for the backward, and a view would keep all of qkv alive
        if self.softmax is None:
            y = self.linear(q, k, v, context)
        else:
            q, k = self.turn(q, context), self.turn(k, context)
            y = self.softmax(q.reshape(T, G * n, D), k, v, context, sinks=self.sinks)
        return self.out(y.flatten(1))

    def normed(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """The heads x[T, …, D] after QK norm."""
        y: torch.Tensor = norm(x.flatten(1)).view(x.shape) if self.norm_width else norm(x)
        return y

    def cached(self, softmax: Softmax, kv: KV, qkv: torch.Tensor, signals: Signals) -> torch.Tensor:
        """The same with a KV view, where QK norm of each head, RoPE and the write to the cache are one op."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if self.norm_width and q_norm is not None and k_norm is not None:
            q, k, v = qkv.split((self.group_size, 1, 1), 2)
            qkv = torch.cat((self.normed(q, q_norm), self.normed(k, k_norm), v), 2)
            q_norm = k_norm = None
        transform = HeadTransform(
            signals.cos,
            signals.sin,
            self.layout,
            q_weight=None if q_norm is None else q_norm.gain,
            k_weight=None if k_norm is None else k_norm.gain,
            eps=0.0 if q_norm is None else q_norm.eps,
        )
        q = kv.write(softmax.layer, qkv, transform)
        return softmax.cached(kv, q, None, None, self.head_dim, signals, sinks=self.sinks)

    def turn(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Apply RoPE, if the model has it. Grouped queries [T, G, n, D] are read as they are and written contiguously:
        a copy to [T, H, D] first would cost 1 % of a training step on an H200."""
        cos, sin, rows = context.signals.cos, context.signals.sin, context.signals.rows
        if cos is None or sin is None:
            return x
        return ops.rope(x, cos, sin, rows if x.ndim == 4 else None, self.layout)

    def linear(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context) -> torch.Tensor:
        """RoPE rotates the features of the numerator only: in the denominator they must stay positive (RoFormer,
        3.3)."""
        q, k = ops.positive_features(q.reshape(len(q), -1, self.head_dim)), ops.positive_features(k)
        return ops.linear_attention(
            self.turn(q, context),
            self.turn(k, context),
            v,
            context.cu_seqlens,
            context.max_len,
            causal=self.causal,
            norm_q=q,
            norm_k=k,
        )
