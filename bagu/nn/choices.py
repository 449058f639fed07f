"""The choices of a model that have options of their own: norms, positions, MLA, experts. config.py puts them together.

Each is a frozen dataclass; those among which one is chosen are told apart by `kind`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bagu.config import ConfigError

__all__ = [
    "Alibi",
    "Learned",
    "Llama3Scaling",
    "MLAConfig",
    "MoEConfig",
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

NormKind = Literal["layer", "rms", "scale", "group", "batch"]
Placement = Literal["pre", "post", "sandwich", "none"]


def refuse(message: str, hint: str) -> None:
    raise ConfigError(message, hint=hint)


def at_least(owner: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value < least:
            refuse(f"{name} = {value}, and at least {least} is wanted", f"give {name} a value of {least} or more")


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
            refuse(f"norm.eps = {self.eps}, and more than 0 is wanted", "1e-6 is usual for RMSNorm, 1e-5 for LayerNorm")
        if self.bias and self.kind in ("rms", "scale"):
            refuse(f"norm.bias is set, and a norm of kind {self.kind!r} has no shift", "leave bias out")
        if (self.groups is not None) != (self.kind == "group"):
            refuse(f"norm.groups = {self.groups} with kind {self.kind!r}", "group norm, and no other, wants groups")
        if (self.alpha is not None) != (self.placement == "none"):
            refuse(
                f"norm.alpha = {self.alpha} with placement {self.placement!r}",
                "placement 'none' wants alpha (0.2 is usual), and no other has one",
            )
        if self.groups is not None:
            at_least(self, 1, "groups")


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Slow pairs are slowed by `factor`, fast ones kept, those between blended (Llama 3.1)."""

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
        _check_scaling(self)
        if not 0 < self.beta_slow <= self.beta_fast:
            refuse(
                f"beta_slow = {self.beta_slow} is not above 0, or not below beta_fast = {self.beta_fast} and not equal",
                "the paper has 1 and 32, Kimi K2 has 1 and 1",
            )


def _check_scaling(scaling: Llama3Scaling | YarnScaling) -> None:
    at_least(scaling, 1, "original_max_len")
    if not scaling.factor > 0:
        refuse(
            f"factor = {scaling.factor}, and more than 0 is wanted", "a context four times as long has a factor of 4"
        )


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Queries and keys are turned by their position; what attention sees is the distance."""

    kind: Literal["rope"] = "rope"
    base: float = 10000.0
    dim: int | None = None  # features of a head that are turned, from the first; None is all
    layout: Literal["half", "interleaved"] = "half"
    scaling: Llama3Scaling | YarnScaling | None = None

    def __post_init__(self) -> None:
        if not self.base > 0 or (self.base == 1 and isinstance(self.scaling, YarnScaling)):
            refuse(f"the base of RoPE is {self.base}", "it is above 0, and not 1 with YaRN; 10000 is usual")


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
            refuse(
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
        at_least(self, 1, "kv_rank", "nope_dim", "rope_dim", "v_dim")
        if self.q_rank is not None:
            at_least(self, 1, "q_rank")


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
        at_least(self, 1, "num_experts", "top_k", "expert_size", "num_groups", "top_groups")
        at_least(self, 0, "num_shared")
        if self.top_k > self.num_experts:
            refuse(
                f"moe.top_k = {self.top_k} is more than num_experts = {self.num_experts}",
                "a token visits each expert at most once",
            )
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            refuse(
                f"moe has {self.num_experts} experts, num_groups = {self.num_groups}, top_groups = {self.top_groups}",
                "num_groups divides num_experts, and top_groups is at most num_groups",
            )
        per_group = self.num_experts // self.num_groups
        if self.top_k > per_group * self.top_groups:
            refuse(
                f"moe.top_k = {self.top_k} is more than the {per_group * self.top_groups} experts of top_groups",
                "raise top_groups or lower top_k",
            )
        if self.num_groups > 1 and per_group < 2:
            refuse(f"moe has {per_group} expert a group", "a group is ranked by its best two experts: lower num_groups")


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """How much YaRN sharpens attention when the context grows by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
