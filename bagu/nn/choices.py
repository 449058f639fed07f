"""Model options that have options of their own: norms, MLA, experts. config.py combines them with the position
encodings (position_choices.py).

Each is a frozen dataclass; `kind` selects one of several alternatives.
"""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NoReturn

from bagu.config import ConfigError

# Metadata of a field that was added after the first checkpoints were written. The fingerprint of a model leaves it out
# where it has its default, so the fingerprint stays the one in older checkpoints (recipes/training.py).
NEWER = MappingProxyType({"newer": True})
NormKind = Literal["layer", "rms", "scale", "group", "batch"]
Placement = Literal["pre", "post", "output", "sandwich", "none"]


def refuse(message: str, hint: str) -> NoReturn:
    raise ConfigError(message, hint=hint)


def at_least(owner: object, least: int, *names: str) -> None:
    """Refuse a field of `owner` below `least`."""
    for name in names:
        value = getattr(owner, name)
        if value < least:
            refuse(f"{name} = {value}; expected at least {least}", f"set {name} to {least} or more")


@dataclass(frozen=True, kw_only=True)
class BlockChoice:
    """Block-sparse attention: a token attends to its own block of keys, the `near` ones before it, the first, and the
    `top` others that its query chooses by their mean keys (ops.choose_blocks). It has no weights, so a checkpoint can
    be trained and served with it or without."""

    size: int = 64  # positions of a block; the engine's KV blocks have the same
    top: int = 16
    near: int = 8
    dense_below: int = 2048  # a token before this position attends to all blocks

    def __post_init__(self) -> None:
        at_least(self, 1, "size")
        at_least(self, 0, "top", "near", "dense_below")
        if self.dense_below % self.size:
            refuse(
                f"blocks.dense_below = {self.dense_below} with blocks of {self.size}",
                "all tokens of a block attend to all blocks, or none: use a multiple of size",
            )


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
