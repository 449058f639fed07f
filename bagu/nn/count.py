"""What a model costs before it is run: parameters, FLOPs, bytes of activations and of KV cache.

FLOPs are a token's, in documents of `context` tokens. Attention is counted as far as a token sees: half the square of
the context when causal, the window where there is one. Two conventions for training:

    model FLOPs      three times the forward's products with weights, keys and values (each has two gradients); for MFU
    op FLOPs         the sum of the ops' own costs: norms and activations too, and what a backward makes again
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import torch

from bagu.errors import ArgumentError
from bagu.nn.config import ModelConfig
from bagu.nn.model import Transformer
from bagu.nn.moe import MoE
from bagu.nn.norm import Norm
from bagu.nn.trace import Trace

__all__ = ["Flops", "Parameters", "activation_bytes", "flops", "kv_bytes", "mfu", "parameters", "six_nd"]


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How many, by part. `active` are those that one token meets: all but the experts it is not sent to."""

    embedding: int  # of tokens, positions and token types; with a tied head this is the head too
    attention: int
    ffn: int  # routers and all experts
    norm: int
    head: int
    active: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.ffn + self.norm + self.head


@dataclass(frozen=True, kw_only=True)
class Flops:
    """A token's share of one forward, and of forward and backward together."""

    linear: float  # products with weights, the head's included
    attention: float  # queries with keys, weights with values
    other: float  # norms, activations, RoPE, softmax of the router
    op_training: float  # the ops' own costs, forward and backward

    @property
    def forward(self) -> float:
        """Of the products alone."""
        return self.linear + self.attention

    @property
    def training(self) -> float:
        """Model FLOPs of forward and backward."""
        return 3 * self.forward


def parameters(config: ModelConfig) -> Parameters:
    model = Transformer(config, device="meta")
    parts: Counter[str] = Counter()
    for path, module in model.named_modules():
        size = sum(p.numel() for p in module.parameters(recurse=False))
        top = path.split(".")[0]
        if isinstance(module, Norm):
            parts["norm"] += size
        elif top == "blocks":
            parts["ffn" if ".ffn" in path else "attention"] += size
        else:
            parts["head" if top in ("head", "mlm") else "embedding"] += size
    idle = sum(
        (m.moe.num_experts - m.moe.top_k) * p[0].numel()
        for m in model.modules() if isinstance(m, MoE)
        for p in m.parameters(recurse=False)
    )  # fmt: skip
    sizes = {name: parts[name] for name in ("embedding", "attention", "ffn", "norm", "head")}
    return Parameters(**sizes, active=sum(sizes.values()) - idle)


@functools.cache
def flops(config: ModelConfig, context: int) -> Flops:
    """Of a token in documents of `context` tokens, the head included."""
    forward, backward = Trace(_on_meta(config, 2, context), context).flops()
    return Flops(
        linear=forward["linear"] / context,
        attention=forward["attention"] / context,
        other=forward["other"] / context,
        op_training=(forward.total() + backward.total()) / context,
    )


def six_nd(config: ModelConfig, *, embeddings: bool = False) -> int:
    """The rule of thumb for a token's training FLOPs: 6 N, N the active parameters, without the embedding tables
    unless asked for. A tied table is the head's weight, which is a product, and stays."""
    n = parameters(config)
    return 6 * (n.active - (0 if embeddings or config.tie_embeddings else n.embedding))


def mfu(*, tokens_per_s: float, flops_per_token: float, peak_flops: float) -> float:
    """Model FLOPs utilisation, a share: 0.4 is 40 %. `flops_per_token` is `Flops.training`, or `forward` in serving."""
    return tokens_per_s * flops_per_token / peak_flops


def kv_bytes(config: ModelConfig, *, itemsize: int = 2) -> int:
    """Of one token in the cache, all layers together. Linear attention keeps a state instead, whatever the length."""
    if config.attention == "linear":
        return 0
    if config.mla is not None:
        return config.num_layers * (config.mla.kv_rank + config.mla.rope_dim) * itemsize
    return config.num_layers * config.num_kv_heads * (config.head_dim + config.v_dim) * itemsize


def activation_bytes(
    config: ModelConfig, context: int, *, itemsize: int = 2, recompute: Literal["none", "block"] = "none"
) -> float:
    """Bytes a token that one forward keeps for the backward, up to the head's input.

    "block" keeps the inputs of each block and computes the rest again, so what one block keeps comes on top once.
    They are what a second document adds: what does not grow with the tokens, such as a cast weight, is not counted.
    """
    model = _on_meta(config, itemsize, context)
    one, two = (Trace(model, context, documents) for documents in (1, 2))
    if recompute == "none":
        return (two.kept_bytes() - one.kept_bytes()) / context
    pairs = zip(one.kept_bytes_recomputing(), two.kept_bytes_recomputing(), strict=True)
    return max(more - less for less, more in pairs) / context


def _on_meta(config: ModelConfig, itemsize: int, context: int) -> Transformer:
    """The model without memory; counts do not depend on how many positions it has."""
    dtypes = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    if itemsize not in dtypes:
        raise ArgumentError(f"a model of {itemsize} bytes a number", hint="itemsize is 2, 4 or 8")
    long_enough = replace(config, max_len=max(config.max_len, context))
    return Transformer(long_enough, device="meta", dtype=dtypes[itemsize])
