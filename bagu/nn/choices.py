"""Model options that have options of their own: norms, positions, MLA, experts. config.py combines them.

Each is a frozen dataclass; `kind` selects one of several alternatives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from bagu.config import ConfigError

__all__ = [
    "NEWER",
    "Alibi",
    "GateClamp",
    "LayerPositions",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MLAConfig",
    "MoEConfig",
    "Multipliers",
    "NoPositions",
    "NormConfig",
    "Positions",
    "Rope",
    "Sinusoidal",
    "T5Relative",
    "YarnScaling",
    "at_least",
    "refuse",
    "yarn_mscale",
]

# Metadata of a field that was added after the first checkpoints were written. The fingerprint of a model leaves it out
# where it has its default, so the fingerprint stays the one in older checkpoints (recipes/training.py).
NEWER = MappingProxyType({"newer": True})
NormKind = Literal["layer", "rms", "scale", "group", "batch"]
Placement = Literal["pre", "post", "output", "sandwich", "none"]


def refuse(message: str, hint: str) -> None:
    raise ConfigError(message, hint=hint)


def at_least(owner: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value < least:
            refuse(f"{name} = {value}; expected at least {least}", f"set {name} to {least} or more")


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """The kind of norm, and its placement.

    pre:       x + f(norm(x)), and a norm before the head        post: norm(x + f(x)), as in BERT
    sandwich:  x + norm(f(norm(x))), and a norm before the head  none: x + alpha * f(x / beta), beta the expected size
    output:    x + norm(f(x)), and a norm before the head              of x (NFNet, https://arxiv.org/abs/2102.06171)
    """

    kind: NormKind = "rms"
    placement: Placement = "pre"
    eps: float = 1e-6
    bias: bool = False  # layer, group and batch norm: whether the norm has a bias
    unit_offset: bool = field(default=False, metadata=NEWER)  # RMSNorm: the gain is 1 + weight (Gemma)
    groups: int | None = None  # group norm: number of groups of features, each normalized separately
    alpha: float | None = None  # placement none: the scale of what a block adds, relative to one block

    def __post_init__(self) -> None:
        if not self.eps > 0:
            refuse(f"norm.eps = {self.eps}; expected more than 0", "1e-6 is common for RMSNorm, 1e-5 for LayerNorm")
        if self.bias and self.kind in ("rms", "scale"):
            refuse(f"norm.bias is set, but a norm of kind {self.kind!r} has no bias", "leave bias out")
        if self.unit_offset and self.kind != "rms":
            refuse(f"norm.unit_offset with kind {self.kind!r}", "only RMSNorm has it: leave unit_offset out")
        if (self.groups is not None) != (self.kind == "group"):
            refuse(f"norm.groups = {self.groups} with kind {self.kind!r}", "only group norm has groups")
        if (self.alpha is not None) != (self.placement == "none"):
            refuse(
                f"norm.alpha = {self.alpha} with placement {self.placement!r}",
                "only placement 'none' has alpha, and it needs it (0.2 is common)",
            )
        if self.groups is not None:
            at_least(self, 1, "groups")


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All frequencies are divided by `factor` (position interpolation, https://arxiv.org/abs/2306.15595)."""

    kind: Literal["linear"] = "linear"
    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Low-frequency pairs are divided by `factor`, high-frequency pairs kept, those between interpolated (Llama
    3.1)."""

    kind: Literal["llama3"] = "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192

    def __post_init__(self) -> None:
        _check_scaling(self)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            refuse(
                f"low_freq_factor = {self.low_freq_factor} is not above 0 or not below high_freq_factor = "
                f"{self.high_freq_factor}",
                "Llama 3.1 uses 1 and 4",
            )


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): the frequencies of pairs that rotate less than `beta_slow` times over
    `original_max_len` are divided by `factor`, those of pairs that rotate more than `beta_fast` times are kept, and the
    rest are interpolated with a ramp.

    The softmax is sharpened for long contexts: cos and sin are multiplied by `attention_factor` if it is given, else by
    0.1 * ln(factor) + 1. `mscale` and `mscale_all_dim` are DeepSeek's form of this: the first scales cos and sin
    (relative to the second), the second scales the softmax of MLA.
    """

    kind: Literal["yarn"] = "yarn"
    factor: float
    original_max_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # the ends of the ramp are rounded to integers

    def __post_init__(self) -> None:
        _check_scaling(self)
        if not 0 < self.beta_slow <= self.beta_fast:
            refuse(
                f"beta_slow = {self.beta_slow} and beta_fast = {self.beta_fast}: expected 0 < beta_slow <= beta_fast",
                "the paper uses 1 and 32, Kimi K2 uses 1 and 1",
            )


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (https://arxiv.org/abs/2402.13753): each frequency is divided by a factor of its own, from
    `long_factors` for contexts longer than `original_max_len`, otherwise from `short_factors`.

    Keys that are in a cache cannot change their factors, so a model uses one list for all sequences, as vLLM does: the
    long factors if its `max_len` is above `original_max_len`. cos and sin are multiplied by `attention_factor` if it is
    given, else by sqrt(1 + ln(factor) / ln(original_max_len)), in both cases.
    """

    kind: Literal["longrope"] = "longrope"
    factor: float  # the longest context over the original one
    original_max_len: int
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        at_least(self, 2, "original_max_len")
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if not factors or not all(type(f) in (int, float) and 0 < f < math.inf for f in factors):
                refuse(f"{name} = {factors}", "use a number above 0 for each pair of features")

    def factors(self, max_len: int) -> tuple[float, ...]:
        return self.long_factors if max_len > self.original_max_len else self.short_factors


def _check_scaling(scaling: Llama3Scaling | YarnScaling) -> None:
    at_least(scaling, 1, "original_max_len")
    _check_factor(scaling.factor)


def _check_factor(factor: float) -> None:
    if not factor > 0:
        refuse(f"factor = {factor}; expected more than 0", "a context four times as long has a factor of 4")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Queries and keys are rotated by their position, so attention depends on the distance."""

    kind: Literal["rope"] = "rope"
    base: float = 10000.0
    dim: int | None = None  # number of features of a head to rotate, from the first; None is all
    layout: Literal["half", "interleaved"] = "half"
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None = None

    def __post_init__(self) -> None:
        if not self.base > 0 or (self.base == 1 and isinstance(self.scaling, YarnScaling)):
            refuse(f"the base of RoPE is {self.base}", "use a base above 0, and not 1 with YaRN; 10000 is common")


@dataclass(frozen=True, kw_only=True)
class Learned:
    """One learned vector per position, added to the embedding."""

    kind: Literal["learned"] = "learned"
    # the vector of position p is row p + offset; token offset - 1 is padding without one (RoBERTa)
    offset: int = field(default=0, metadata=NEWER)

    def __post_init__(self) -> None:
        at_least(self, 0, "offset")


@dataclass(frozen=True, kw_only=True)
class Sinusoidal:
    """Sines and cosines added to the embedding, which is first multiplied by sqrt(hidden_size), as in the paper."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    base: float = 10000.0


@dataclass(frozen=True, kw_only=True)
class Alibi:
    """Scores decrease with the distance, with a different slope per head (https://arxiv.org/abs/2108.12409)."""

    kind: Literal["alibi"] = "alibi"


@dataclass(frozen=True, kw_only=True)
class T5Relative:
    """A learned bias per head and distance bucket, added to the scores; all layers share one table."""

    kind: Literal["t5"] = "t5"
    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        if self.buckets < 4 or self.buckets % 4 or self.max_distance <= self.buckets // 2:
            refuse(
                f"positions.buckets = {self.buckets} with max_distance = {self.max_distance}",
                "buckets must be a multiple of 4 and max_distance more than half of it; T5 uses 32 and 128",
            )


@dataclass(frozen=True, kw_only=True)
class NoPositions:
    """No position encoding: a causal model can still infer the order from the causal mask."""

    kind: Literal["none"] = "none"


Positions = Rope | Learned | Sinusoidal | Alibi | T5Relative | NoPositions


@dataclass(frozen=True, kw_only=True)
class LayerPositions:
    """Layers that differ from the others in their positions: another RoPE (Gemma 3), or none (SmolLM3)."""

    layers: tuple[int, ...]
    positions: Rope | NoPositions


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Constant factors (Granite, Gemma) of the embedding, of the attention scores (None is 1 / sqrt(head_dim)) and of
    what a sublayer adds to the stream; and a divisor of the logits."""

    embedding: float = 1.0
    attention: float | None = None
    residual: float = 1.0
    logits_divisor: float = 1.0

    def __post_init__(self) -> None:
        if self.attention is not None and not self.attention > 0:
            refuse(f"multipliers.attention = {self.attention}; expected more than 0", "None is 1 / sqrt(head_dim)")
        if not self.logits_divisor > 0:
            refuse(f"multipliers.logits_divisor = {self.logits_divisor}; expected more than 0", "1 changes nothing")


@dataclass(frozen=True, kw_only=True)
class GateClamp:
    """gpt-oss's SwiGLU: gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit` and |up| at most `limit`."""

    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        if not self.limit > 0:
            refuse(f"gate_clamp.limit = {self.limit}; expected more than 0", "gpt-oss uses 7")


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): keys and values are computed from
    one latent of `kv_rank` per token, and one key of `rope_dim` that all heads share carries the position."""

    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None = None  # None: queries are computed from the hidden state directly
    eps: float = 1e-6  # of the norms of the latents

    def __post_init__(self) -> None:
        at_least(self, 1, "kv_rank", "nope_dim", "rope_dim", "v_dim")
        if self.q_rank is not None:
            at_least(self, 1, "q_rank")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts instead of the FFN, in all layers except `dense_layers`."""

    num_experts: int
    top_k: int
    expert_size: int  # intermediate size of an expert
    num_shared: int = 0  # experts that process every token, computed as one FFN of num_shared * expert_size
    dense_layers: tuple[int, ...] = ()
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True  # normalize the weights of a token's experts to sum 1 (before route_scale)
    route_scale: float = 1.0
    num_groups: int = 1  # DeepSeek-V3: equal groups of experts; a token uses experts of its best `top_groups` groups
    top_groups: int = 1
    aux_weight: float | None = None  # weight of the load-balancing loss; None disables it
    router_bias: bool = field(default=False, metadata=NEWER)  # a learned bias of the router's logits (gpt-oss)
    bias_rate: float | None = None  # step size of the aux-free balancing bias; None disables it

    def __post_init__(self) -> None:
        at_least(self, 1, "num_experts", "top_k", "expert_size", "num_groups", "top_groups")
        at_least(self, 0, "num_shared")
        if self.top_k > self.num_experts:
            refuse(
                f"moe.top_k = {self.top_k} is more than num_experts = {self.num_experts}",
                "a token uses each expert at most once",
            )
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            refuse(
                f"moe has {self.num_experts} experts, num_groups = {self.num_groups}, top_groups = {self.top_groups}",
                "num_groups must divide num_experts, and top_groups must be at most num_groups",
            )
        per_group = self.num_experts // self.num_groups
        if self.top_k > per_group * self.top_groups:
            refuse(
                f"moe.top_k = {self.top_k} is more than the {per_group * self.top_groups} experts of top_groups",
                "raise top_groups or lower top_k",
            )
        if self.num_groups > 1 and per_group < 2:
            refuse(f"moe has {per_group} expert per group", "a group needs two experts or more: lower num_groups")


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """The factor by which YaRN sharpens attention if the context grows by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
