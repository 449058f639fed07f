"""The cost of a model, without running it: parameters, FLOPs, bytes of activations and of the KV cache.

FLOPs are per token, in documents of `context` tokens. Attention counts only the keys that a token attends to: half the
square of the context if causal, the window if there is one. There are two conventions for training:

    model FLOPs      three times the forward's products with weights, keys and values (each has two gradients); for MFU
    op FLOPs         the sum of the costs in the ops' specs, with norms, activations and recomputation in the backward
"""

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


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameter counts by part. `active` counts those that one token uses: all but the experts it is not routed to."""

    embedding: int  # tokens, positions and token types; includes a tied head
    attention: int
    ffn: int  # includes routers and all experts
    norm: int
    head: int
    active: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.ffn + self.norm + self.head


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs per token of a forward, and of forward and backward together."""

    linear: float  # products with weights, including the head
    attention: float  # queries with keys, weights with values
    other: float  # norms, activations, RoPE, softmax of the router
    op_training: float  # the costs in the ops' specs, forward and backward

    @property
    def forward(self) -> float:
        """FLOPs of the products in a forward."""
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
            parts["head" if top in ("head", "mlm", "score") else "embedding"] += size
    idle = sum(
        (m.moe.num_experts - m.moe.top_k) * p[0].numel()
        for m in model.modules()
        if isinstance(m, MoE)
        for p in m.parameters(recurse=False)
    )
    sizes = {name: parts[name] for name in ("embedding", "attention", "ffn", "norm", "head")}
    return Parameters(**sizes, active=sum(sizes.values()) - idle)


@functools.cache
def flops(config: ModelConfig, context: int) -> Flops:
    """FLOPs per token in documents of `context` tokens, including the head."""
    forward, backward = Trace(_on_meta(config, 2, context), context).flops()
    return Flops(
        linear=forward["linear"] / context,
        attention=forward["attention"] / context,
        other=forward["other"] / context,
        op_training=(forward.total() + backward.total()) / context,
    )


def six_nd(config: ModelConfig, *, embeddings: bool = False) -> int:
    """The rule of thumb for training FLOPs per token: 6 N, where N counts the active parameters. It includes embedding
    tables only if `embeddings` is set, except a tied table, which is also the weight of the head."""
    n = parameters(config)
    return 6 * (n.active - (0 if embeddings or config.tie_embeddings else n.embedding))


def mfu(*, tokens_per_s: float, flops_per_token: float, peak_flops: float) -> float:
    """Model FLOPs utilisation as a fraction: 0.4 is 40 %. Pass `Flops.training`, or `forward` for serving."""
    return tokens_per_s * flops_per_token / peak_flops


def kv_bytes(config: ModelConfig, *, itemsize: int = 2, context: int | None = None) -> int:
    """Bytes of one token in the KV cache, over all layers; with `context` the mean over a sequence of so many tokens,
    of which a layer with a window keeps the last. Linear attention has a state of fixed size instead."""
    if config.attention == "linear":
        return 0
    layers, each = config.num_layers, config.num_kv_heads * (config.head_dim + config.v_dim) * itemsize
    if config.mla is not None:
        each = (config.mla.kv_rank + config.mla.rope_dim) * itemsize
    if context is None:
        return layers * each
    return -(-each * sum(min(context, config.window(i) or context) for i in range(layers)) // context)


def activation_bytes(
    config: ModelConfig, context: int, *, itemsize: int = 2, recompute: Literal["none", "block"] = "none"
) -> float:
    """Bytes per token that a forward saves for the backward, up to the head's input.

    "block" saves the inputs of each block and recomputes the rest, so the tensors that one block saves are added once.
    The count is the difference that a second document makes, so memory that does not grow with the tokens, such as a
    cast weight, is not counted.
    """
    model = _on_meta(config, itemsize, context)
    one, two = (Trace(model, context, documents) for documents in (1, 2))
    if recompute == "none":
        return (two.kept_bytes() - one.kept_bytes()) / context
    pairs = zip(one.kept_bytes_recomputing(), two.kept_bytes_recomputing(), strict=True)
    return max(more - less for less, more in pairs) / context


def _on_meta(config: ModelConfig, itemsize: int, context: int) -> Transformer:
    """The model on the meta device; counts do not depend on its number of positions."""
    dtypes = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    if itemsize not in dtypes:
        raise ArgumentError(f"a model of {itemsize} bytes a number", hint="itemsize is 2, 4 or 8")
    long_enough = replace(config, max_len=max(config.max_len, context))
    return Transformer(long_enough, device="meta", dtype=dtypes[itemsize])
