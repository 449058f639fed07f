"""What a model costs, as the products that a layer runs: their shapes, parameters and FLOPs.

A product with a weight is a `Linear(n, k)`: [tokens, k] x [k, n]. Tensor parallelism divides n ("columns") or k
("rows"), or nothing. A model has one or two kinds of layer (with a dense FFN, with experts). tests/parallel compare the
parameters and FLOPs with bagu.nn.count, which records a real forward.
"""

from dataclasses import dataclass
from typing import Literal

from bagu.nn.config import ModelConfig, MoEConfig
from bagu.nn.position_choices import Learned


@dataclass(frozen=True, kw_only=True)
class Linear:
    n: int
    k: int
    split: Literal["columns", "rows", "none"]

    @property
    def parameters(self) -> int:
        return self.n * self.k


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One kind of layer. `count` layers of the model are of this kind."""

    count: int
    linears: tuple[Linear, ...]  # every token uses them
    experts: tuple[Linear, ...] = ()  # of one routed expert
    moe: MoEConfig | None = None
    replicated: int  # parameters that tensor parallelism does not divide: norms, routers, latent projections

    @property
    def sharded(self) -> int:
        """Parameters that tensor parallelism divides, without routed experts."""
        return sum(x.parameters for x in self.linears if x.split != "none")

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts."""
        return 0 if self.moe is None else self.moe.num_experts * sum(x.parameters for x in self.experts)

    @property
    def parameters(self) -> int:
        return self.sharded + self.replicated + self.expert_parameters

    def linear_flops(self) -> int:
        """Of the forward, per token."""
        routed = 0 if self.moe is None else self.moe.top_k * sum(x.parameters for x in self.experts)
        router = 0 if self.moe is None else self.moe.num_experts * self.linears[0].k
        return 2 * (sum(x.parameters for x in self.linears) + routed + router)


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    config: ModelConfig
    layers: tuple[LayerCost, ...]
    embedding: int  # parameters of the tables, without a tied head
    head: int  # parameters of the head (of the tied table, if it is tied)
    final: int  # of the last norm

    @property
    def parameters(self) -> int:
        tied = self.config.vocab_size * self.config.hidden_size if self.config.tie_embeddings else 0
        body = sum(layer.count * layer.parameters for layer in self.layers)
        return body + self.embedding + self.head + self.final - tied

    @property
    def linear_parameters(self) -> int:
        """Parameters of the layers' products that every token uses."""
        return sum(layer.count * sum(x.parameters for x in layer.linears) for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        idle = 0
        for layer in self.layers:
            if layer.moe is not None:
                share = 1 - layer.moe.top_k / layer.moe.num_experts
                idle += round(layer.count * layer.expert_parameters * share)
        return self.parameters - idle

    @property
    def head_layers(self) -> float:
        """The head's products, in layers."""
        body = sum(layer.count * layer.linear_flops() for layer in self.layers)
        return 2 * self.head * self.config.num_layers / body

    def keys(self, length: int) -> float:
        """Mean number of keys that a token attends to, in documents of `length` tokens, averaged over the layers."""
        windows = self.config.windows
        return sum(_keys(length, w, self.config.causal) for w in windows) / len(windows)

    def attention_flops(self, length: int) -> float:
        """Of the forward, per token and layer: queries with keys, weights with values."""
        c = self.config
        return 2 * self.keys(length) * c.num_heads * (c.head_dim + c.v_dim)

    def training_flops(self, length: int) -> float:
        """Model FLOPs per token of forward and backward, for MFU."""
        body = sum(layer.count * (layer.linear_flops() + self.attention_flops(length)) for layer in self.layers)
        return 3 * (body + 2 * self.head)


def model_cost(config: ModelConfig) -> ModelCost:
    moe = config.moe
    dense = config.num_layers if moe is None else len(set(moe.dense_layers))
    layers = [_layer(config, None, dense)] if dense else []
    if moe is not None:
        layers.append(_layer(config, moe, config.num_layers - dense))
    h, norm = config.hidden_size, _norm(config)
    learned = (config.max_len + config.positions.offset) * h if isinstance(config.positions, Learned) else 0
    tables = config.vocab_size * h + learned + config.num_token_types * h
    mlm = h * h + h + norm + config.vocab_size if config.mlm_head else 0
    return ModelCost(
        config=config,
        layers=tuple(layers),
        embedding=tables + (norm if config.embedding_norm else 0),
        head=h if config.score_head else config.vocab_size * h + mlm if config.lm_head else 0,
        final=norm if config.final_norm else 0,
    )


def _layer(config: ModelConfig, moe: MoEConfig | None, count: int) -> LayerCost:
    h, norm = config.hidden_size, _norm(config)
    norms = {"pre": 2, "post": 2, "output": 2, "sandwich": 4, "none": 0}[config.norm.placement] * norm
    attention, small = _attention(config)
    if moe is None:
        return LayerCost(
            count=count,
            linears=(*attention, *_ffn(config, config.intermediate_size)),
            replicated=norms + small + _biases(config, None),
        )
    shared = _ffn(config, moe.num_shared * moe.expert_size) if moe.num_shared else ()
    return LayerCost(
        count=count,
        linears=(*attention, *shared),
        experts=_ffn(config, moe.expert_size),
        moe=moe,
        replicated=norms + small + moe.num_experts * (h + moe.router_bias) + _biases(config, moe),
    )


def _attention(config: ModelConfig) -> tuple[tuple[Linear, ...], int]:
    """The products, and the parameters that are not in them or not divided."""
    h, H, G, d = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    out = Linear(n=h, k=H * config.v_dim, split="rows")
    if config.mla is None:
        qkv = (H + 2 * G) * d
        normed = {False: 0, True: 2 * d, "width": (H + G) * d}[config.qk_norm]
        small = (qkv if config.qkv_bias else 0) + (h if config.out_bias else 0) + normed + (H if config.sinks else 0)
        return (Linear(n=qkv, k=h, split="columns"), out), small
    mla = config.mla
    latent = Linear(n=mla.kv_rank + mla.rope_dim, k=h, split="none")
    up = Linear(n=H * (mla.nope_dim + mla.v_dim), k=mla.kv_rank, split="columns")
    small = latent.parameters + mla.kv_rank + (h if config.out_bias else 0)
    if mla.q_rank is None:
        return (Linear(n=H * d, k=h, split="columns"), latent, up, out), small
    down = Linear(n=mla.q_rank, k=h, split="none")
    small += down.parameters + mla.q_rank
    return (down, Linear(n=H * d, k=mla.q_rank, split="columns"), latent, up, out), small


def _ffn(config: ModelConfig, size: int) -> tuple[Linear, ...]:
    h = config.hidden_size
    up = Linear(n=(2 if config.gated else 1) * size, k=h, split="columns")
    return up, Linear(n=h, k=size, split="rows")


def _biases(config: ModelConfig, moe: MoEConfig | None) -> int:
    """The biases of the feed-forward network: of the dense one, or of the shared and the routed experts."""
    if not config.ffn_bias:
        return 0
    up, h = 2 if config.gated else 1, config.hidden_size
    if moe is None:
        return up * config.intermediate_size + h
    shared = up * moe.num_shared * moe.expert_size + h if moe.num_shared else 0
    return shared + moe.num_experts * (up * moe.expert_size + h)


def _norm(config: ModelConfig) -> int:
    """Parameters of one norm."""
    weights = 1 if config.norm.kind == "scale" else config.hidden_size
    return weights + (config.hidden_size if config.norm.bias else 0)


def _keys(length: int, window: int | None, causal: bool) -> float:
    """Mean number of keys per token."""
    if not causal:
        return float(length if window is None else min(length, 2 * window - 1))
    if window is None or window >= length:
        return (length + 1) / 2
    return window - window * (window - 1) / (2 * length)
