"""What a model is: one frozen tree of plain values, from which `Transformer` is built and a family is told apart.

    attention kind    num_heads H, num_kv_heads G: MHA is G = H, MQA is G = 1, GQA is between; `mla` replaces the keys
                      and values by a latent; `attention="linear"` replaces the softmax
    layer i           windows[i % len(windows)], and a mixture of experts unless i is in moe.dense_layers

A choice that has options of its own is a dataclass (choices.py), so there is no option without an effect. Combinations
that have no meaning are refused when the config is made. JSON in and out: `bagu.config`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from bagu.nn.choices import (
    Alibi,
    Learned,
    Llama3Scaling,
    MLAConfig,
    MoEConfig,
    NoPositions,
    NormConfig,
    Positions,
    Rope,
    Sinusoidal,
    T5Relative,
    YarnScaling,
    at_least,
    refuse,
    yarn_mscale,
)

__all__ = [
    "Alibi",
    "FFNKind",
    "Learned",
    "Llama3Scaling",
    "MLAConfig",
    "MoEConfig",
    "ModelConfig",
    "NoPositions",
    "NormConfig",
    "Positions",
    "Rope",
    "Sinusoidal",
    "T5Relative",
    "YarnScaling",
]
FFNKind = Literal["gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh"]
GATED: tuple[FFNKind, ...] = ("swiglu", "geglu", "geglu_tanh")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Transformer. Sizes have no defaults; the switches default to a Llama."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_len: int  # longest sequence

    norm: NormConfig = field(default_factory=NormConfig)
    positions: Positions = field(default_factory=Rope)
    attention: Literal["softmax", "linear"] = "softmax"
    mla: MLAConfig | None = None
    causal: bool = True
    windows: tuple[int | None, ...] = (None,)  # a pattern over the layers: how far back a token sees, itself included
    qk_norm: bool = False  # RMSNorm of each head's query and key (Qwen3)
    qkv_bias: bool = False
    out_bias: bool = False
    ffn: FFNKind = "swiglu"
    ffn_bias: bool = False
    moe: MoEConfig | None = None
    weight_norm: bool = False  # each row of a linear's weight is a direction and a learned length
    dropout: float = 0.0  # of the embedding and of what each sublayer adds

    tie_embeddings: bool = False
    embedding_norm: bool = False  # BERT: a norm on the summed embeddings
    num_token_types: int = 0  # BERT: a learned vector a segment type, added to the embedding
    mlm_head: bool = False  # BERT: dense, GELU and norm before the head, and a bias in it
    init_std: float = 0.02

    def __post_init__(self) -> None:
        at_least(self, 1, "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        at_least(self, 1, "intermediate_size", "max_len")
        at_least(self, 0, "num_token_types")
        self._check_heads()
        self._check_positions()
        self._check_windows()
        self._check_rest()

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            refuse(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}",
                "a key head serves a whole number of query heads",
            )
        mla = self.mla
        if mla is None:
            return
        if self.num_kv_heads != self.num_heads or self.head_dim != mla.nope_dim + mla.rope_dim:
            refuse(
                f"MLA with num_kv_heads = {self.num_kv_heads} and head_dim = {self.head_dim}",
                f"MLA has a key a head and heads of nope_dim + rope_dim: num_kv_heads={self.num_heads}, "
                f"head_dim={mla.nope_dim + mla.rope_dim}",
            )
        if self.qk_norm or self.qkv_bias:
            refuse("MLA with qk_norm or qkv_bias", "MLA norms its latents and has no such bias: leave both out")
        if not isinstance(self.positions, Rope):
            refuse(f"MLA with {self.positions.kind!r} positions", "MLA keeps rope_dim features for RoPE: use Rope")

    def _check_positions(self) -> None:
        p = self.positions
        if isinstance(p, Rope):
            room = self.mla.rope_dim if self.mla is not None else self.head_dim
            turned = self.rope_dim
            if turned % 2 or not 2 <= turned <= room:
                refuse(f"RoPE turns {turned} of {room} features", "pairs are turned: an even number, at most head_dim")
            if self.mla is not None and p.dim is not None:
                refuse(f"positions.dim = {p.dim} with MLA", "mla.rope_dim says how many features are turned")
        if isinstance(p, Sinusoidal) and self.hidden_size % 2:
            refuse(f"sinusoidal positions with hidden_size = {self.hidden_size}", "sines and cosines come in pairs")
        if self.attention == "linear" and (self.mla is not None or isinstance(p, (Alibi, T5Relative))):
            refuse(
                f"linear attention with {'MLA' if self.mla is not None else f'{p.kind!r} positions'}",
                "it has no scores to add to: use rope, learned, sinusoidal or no positions, and no MLA",
            )

    def _check_windows(self) -> None:
        if not 1 <= len(self.windows) <= self.num_layers:
            refuse(
                f"windows has {len(self.windows)} entries for {self.num_layers} layers",
                "it is a pattern that repeats over the layers: between one entry and one a layer",
            )
        for w in self.windows:
            if w is not None and w < 1:
                refuse(f"windows has an entry {w}", "a token sees at least itself: 1 or more, or None for all")
        if self.attention == "linear" and any(w is not None for w in self.windows):
            refuse("linear attention with a window", "its state sums over all tokens before: leave windows out")

    def _check_rest(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            refuse(f"dropout = {self.dropout}", "it is a probability below 1")
        if not self.init_std > 0:
            refuse(f"init_std = {self.init_std}, and more than 0 is wanted", "0.02 is usual")
        groups = self.norm.groups
        if groups is not None and self.hidden_size % groups:
            refuse(f"norm.groups = {groups} does not divide hidden_size = {self.hidden_size}", "choose a divisor")
        if self.mlm_head and self.causal:
            refuse("a masked-LM head on a causal model", "set causal=False, or leave mlm_head out")
        if self.norm.placement == "none" and (self.embedding_norm or self.mlm_head):
            refuse("a model without norms, with embedding_norm or mlm_head", "both hold a norm: leave them out")
        if self.moe is not None:
            wrong = [i for i in self.moe.dense_layers if not 0 <= i < self.num_layers]
            if wrong or len(set(self.moe.dense_layers)) == self.num_layers:
                refuse(
                    f"moe.dense_layers = {self.moe.dense_layers} of {self.num_layers} layers",
                    "layers count from 0, and at least one of them has experts",
                )
            if self.ffn_bias:
                refuse("ffn_bias with a mixture of experts", "experts have no bias: leave ffn_bias out")

    @property
    def group_size(self) -> int:
        """Query heads of one key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def v_dim(self) -> int:
        """Features of a head's value."""
        return self.head_dim if self.mla is None else self.mla.v_dim

    @property
    def rope_dim(self) -> int:
        """Features of a head that RoPE turns; 0 without RoPE."""
        if not isinstance(self.positions, Rope):
            return 0
        if self.mla is not None:
            return self.mla.rope_dim
        return self.head_dim if self.positions.dim is None else self.positions.dim

    @property
    def gated(self) -> bool:
        """Whether the FFN has a gate beside its up projection."""
        return self.ffn in GATED

    @property
    def scale(self) -> float:
        """What queries times keys are multiplied by."""
        scaling = self.positions.scaling if isinstance(self.positions, Rope) else None
        sharp = 1.0
        if self.mla is not None and isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
            sharp = yarn_mscale(scaling.factor, scaling.mscale_all_dim)
        return sharp * sharp / math.sqrt(self.head_dim)

    def window(self, layer: int) -> int | None:
        """How many tokens a token of this layer sees, itself included; None is all."""
        return self.windows[layer % len(self.windows)]

    def experts(self, layer: int) -> MoEConfig | None:
        """The mixture of this layer, or None where its FFN is dense."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe
