"""What a model is: one frozen tree of plain values, from which `Transformer` is built and a family is told apart.

    attention kind    num_heads H, num_kv_heads G: MHA is G = H, MQA is G = 1, GQA is between; `mla` replaces the keys
                      and values by a latent; `attention="linear"` replaces the softmax
    layer i           windows[i % len(windows)], and a mixture of experts unless i is in moe.dense_layers

A choice that has options of its own is a dataclass told apart by `kind`, so there is no option without an effect.
Combinations that have no meaning are refused when the config is made. JSON in and out: `bagu.config`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from bagu.config import ConfigError

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

NormKind = Literal["layer", "rms", "scale", "group", "batch"]
Placement = Literal["pre", "post", "sandwich", "none"]
FFNKind = Literal["gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh"]
GATED: tuple[FFNKind, ...] = ("swiglu", "geglu", "geglu_tanh")


def _refuse(message: str, hint: str) -> None:
    raise ConfigError(message, hint=hint)


def _at_least(owner: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value < least:
            _refuse(f"{name} = {value}, and at least {least} is wanted", f"give {name} a value of {least} or more")


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Which norm, and where it stands.

    pre:       x + f(norm(x)), and a norm before the head        post: norm(x + f(x)), as in BERT
    sandwich:  x + norm(f(norm(x))), and a norm before the head  none: x + alpha * f(x / beta), beta the expected size
                                                                  of x (NFNet, https://arxiv.org/abs/2102.06171)
    """

    kind: NormKind = "rms"
    placement: Placement = "pre"
    eps: float = 1e-6
    bias: bool = False  # layer, group and batch norm: whether there is a shift beside the gain
    groups: int | None = None  # group norm: how many equal runs of features are normalised apart
    alpha: float | None = None  # placement none: what a block adds, in units of one block's size

    def __post_init__(self) -> None:
        if not self.eps > 0:
            _refuse(
                f"norm.eps = {self.eps}, and more than 0 is wanted", "1e-6 is usual for RMSNorm, 1e-5 for LayerNorm"
            )
        if self.bias and self.kind in ("rms", "scale"):
            _refuse(f"norm.bias is set, and a norm of kind {self.kind!r} has no shift", "leave bias out")
        if (self.groups is not None) != (self.kind == "group"):
            _refuse(f"norm.groups = {self.groups} with kind {self.kind!r}", "group norm, and no other, wants groups")
        if (self.alpha is not None) != (self.placement == "none"):
            _refuse(
                f"norm.alpha = {self.alpha} with placement {self.placement!r}",
                "placement 'none' wants alpha (0.2 is usual), and no other has one",
            )
        if self.groups is not None:
            _at_least(self, 1, "groups")


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Slow pairs are slowed by `factor`, fast ones kept, those between blended (Llama 3.1)."""

    kind: Literal["llama3"] = "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192

    def __post_init__(self) -> None:
        if not self.low_freq_factor < self.high_freq_factor:
            _refuse(
                f"low_freq_factor = {self.low_freq_factor} is not below high_freq_factor = {self.high_freq_factor}",
                "Llama 3.1 has 1 and 4",
            )


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): pairs that turn less than `beta_slow` times over `original_max_len` are
    slowed by `factor`, those that turn more than `beta_fast` times are kept, and the rest lie on a ramp between.

    Attention is sharpened with the length: by `attention_factor` on cos and sin where given, else by
    0.1 * ln(factor) + 1; `mscale` and `mscale_all_dim` are DeepSeek's form of the same: the first scales cos and sin
    (relative to the second), the second the softmax of MLA.
    """

    kind: Literal["yarn"] = "yarn"
    factor: float
    original_max_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # the ends of the ramp are whole pairs

    def __post_init__(self) -> None:
        if not self.beta_slow < self.beta_fast:
            _refuse(f"beta_slow = {self.beta_slow} is not below beta_fast = {self.beta_fast}", "the paper has 1 and 32")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Queries and keys are turned by their position; what attention sees is the distance."""

    kind: Literal["rope"] = "rope"
    base: float = 10000.0
    dim: int | None = None  # features of a head that are turned, from the first; None is all
    layout: Literal["half", "interleaved"] = "half"
    scaling: Llama3Scaling | YarnScaling | None = None


@dataclass(frozen=True, kw_only=True)
class Learned:
    """One learned vector a position, added to the embedding."""

    kind: Literal["learned"] = "learned"


@dataclass(frozen=True, kw_only=True)
class Sinusoidal:
    """Sines and cosines added to the embedding, which is first multiplied by sqrt(hidden_size), as in the paper."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    base: float = 10000.0


@dataclass(frozen=True, kw_only=True)
class Alibi:
    """Scores fall with the distance, each head at a slope of its own (https://arxiv.org/abs/2108.12409)."""

    kind: Literal["alibi"] = "alibi"


@dataclass(frozen=True, kw_only=True)
class T5Relative:
    """A learned number a head and bucket of distances, added to the scores; one table serves all layers."""

    kind: Literal["t5"] = "t5"
    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        if self.buckets < 4 or self.buckets % 4 or self.max_distance <= self.buckets // 2:
            _refuse(
                f"positions.buckets = {self.buckets} with max_distance = {self.max_distance}",
                "buckets is a multiple of 4 and max_distance more than half of it; T5 has 32 and 128",
            )


@dataclass(frozen=True, kw_only=True)
class NoPositions:
    """None at all: a causal model still knows the order from what each token can see."""

    kind: Literal["none"] = "none"


Positions = Rope | Learned | Sinusoidal | Alibi | T5Relative | NoPositions


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): keys and values are made from one
    latent of `kv_rank` a token, and a key of `rope_dim` that all heads share carries the position."""

    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None = None  # None: queries come from the hidden state itself
    eps: float = 1e-6  # of the norms on the latents

    def __post_init__(self) -> None:
        _at_least(self, 1, "kv_rank", "nope_dim", "rope_dim", "v_dim")
        if self.q_rank is not None:
            _at_least(self, 1, "q_rank")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts instead of the FFN, in all layers but `dense_layers`."""

    num_experts: int
    top_k: int
    expert_size: int  # intermediate size of an expert
    num_shared: int = 0  # experts that every token visits, run as one FFN of num_shared * expert_size
    dense_layers: tuple[int, ...] = ()
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True  # the weights of a token's experts sum to one (before route_scale)
    route_scale: float = 1.0
    num_groups: int = 1  # DeepSeek-V3: experts in equal groups, of which a token may use the best `top_groups`
    top_groups: int = 1
    aux_weight: float | None = None  # weight of the load-balancing loss; None is no such loss
    bias_rate: float | None = None  # step of the aux-free balancing bias; None is no such bias

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_experts", "top_k", "expert_size", "num_groups", "top_groups")
        _at_least(self, 0, "num_shared")
        if self.top_k > self.num_experts:
            _refuse(
                f"moe.top_k = {self.top_k} is more than num_experts = {self.num_experts}",
                "a token visits each expert at most once",
            )
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            _refuse(
                f"moe has {self.num_experts} experts, num_groups = {self.num_groups}, top_groups = {self.top_groups}",
                "num_groups divides num_experts, and top_groups is at most num_groups",
            )
        per_group = self.num_experts // self.num_groups
        if self.top_k > per_group * self.top_groups:
            _refuse(
                f"moe.top_k = {self.top_k} is more than the {per_group * self.top_groups} experts of top_groups",
                "raise top_groups or lower top_k",
            )
        if self.num_groups > 1 and per_group < 2:
            _refuse(
                f"moe has {per_group} expert a group", "a group is ranked by its best two experts: lower num_groups"
            )


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
        _at_least(self, 1, "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        _at_least(self, 1, "intermediate_size", "max_len")
        _at_least(self, 0, "num_token_types")
        self._check_heads()
        self._check_positions()
        self._check_windows()
        self._check_rest()

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            _refuse(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}",
                "a key head serves a whole number of query heads",
            )
        mla = self.mla
        if mla is None:
            return
        if self.num_kv_heads != self.num_heads or self.head_dim != mla.nope_dim + mla.rope_dim:
            _refuse(
                f"MLA with num_kv_heads = {self.num_kv_heads} and head_dim = {self.head_dim}",
                f"MLA has a key a head and heads of nope_dim + rope_dim: num_kv_heads={self.num_heads}, "
                f"head_dim={mla.nope_dim + mla.rope_dim}",
            )
        if self.qk_norm or self.qkv_bias:
            _refuse("MLA with qk_norm or qkv_bias", "MLA norms its latents and has no such bias: leave both out")
        if not isinstance(self.positions, Rope):
            _refuse(f"MLA with {self.positions.kind!r} positions", "MLA keeps rope_dim features for RoPE: use Rope")

    def _check_positions(self) -> None:
        p = self.positions
        if isinstance(p, Rope):
            room = self.mla.rope_dim if self.mla is not None else self.head_dim
            turned = self.rope_dim
            if turned % 2 or not 2 <= turned <= room:
                _refuse(f"RoPE turns {turned} of {room} features", "pairs are turned: an even number, at most head_dim")
            if self.mla is not None and p.dim is not None:
                _refuse(f"positions.dim = {p.dim} with MLA", "mla.rope_dim says how many features are turned")
        if isinstance(p, Sinusoidal) and self.hidden_size % 2:
            _refuse(f"sinusoidal positions with hidden_size = {self.hidden_size}", "sines and cosines come in pairs")
        if self.attention == "linear" and (self.mla is not None or isinstance(p, (Alibi, T5Relative))):
            _refuse(
                f"linear attention with {'MLA' if self.mla is not None else f'{p.kind!r} positions'}",
                "it has no scores to add to: use rope, learned, sinusoidal or no positions, and no MLA",
            )

    def _check_windows(self) -> None:
        if not 1 <= len(self.windows) <= self.num_layers:
            _refuse(
                f"windows has {len(self.windows)} entries for {self.num_layers} layers",
                "it is a pattern that repeats over the layers: between one entry and one a layer",
            )
        for w in self.windows:
            if w is not None and w < 1:
                _refuse(f"windows has an entry {w}", "a token sees at least itself: 1 or more, or None for all")
        if self.attention == "linear" and any(w is not None for w in self.windows):
            _refuse("linear attention with a window", "its state sums over all tokens before: leave windows out")

    def _check_rest(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            _refuse(f"dropout = {self.dropout}", "it is a probability below 1")
        if not self.init_std > 0:
            _refuse(f"init_std = {self.init_std}, and more than 0 is wanted", "0.02 is usual")
        groups = self.norm.groups
        if groups is not None and self.hidden_size % groups:
            _refuse(f"norm.groups = {groups} does not divide hidden_size = {self.hidden_size}", "choose a divisor")
        if self.mlm_head and self.causal:
            _refuse("a masked-LM head on a causal model", "set causal=False, or leave mlm_head out")
        if self.norm.placement == "none" and (self.embedding_norm or self.mlm_head):
            _refuse("a model without norms, with embedding_norm or mlm_head", "both hold a norm: leave them out")
        if self.moe is not None:
            wrong = [i for i in self.moe.dense_layers if not 0 <= i < self.num_layers]
            if wrong or len(set(self.moe.dense_layers)) == self.num_layers:
                _refuse(
                    f"moe.dense_layers = {self.moe.dense_layers} of {self.num_layers} layers",
                    "layers count from 0, and at least one of them has experts",
                )
            if self.ffn_bias:
                _refuse("ffn_bias with a mixture of experts", "experts have no bias: leave ffn_bias out")

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


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """How much YaRN sharpens attention when the context grows by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
