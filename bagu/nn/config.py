"""The configuration of a model: one frozen tree of plain values. `Transformer` is built from it.

    attention kind    num_heads H, num_kv_heads G: MHA is G = H, MQA is G = 1, GQA is between; `mla` replaces keys and
                      values by a latent; `attention="linear"` replaces the softmax, and
                      `attention="blocks"` applies it to few blocks of keys that a query chooses (`blocks`)
    layer i           windows[i % len(windows)]; a mixture of experts unless i is in moe.dense_layers; `positions`
                      unless i is in layer_positions.layers

An option that has options of its own is a dataclass (choices.py, position_choices.py), so every option has an effect.
Invalid combinations raise when the config is created. `bagu.config` reads and writes it as JSON.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from bagu.nn.choices import (
    NEWER,
    BlockChoice,
    GateClamp,
    MLAConfig,
    MoEConfig,
    Multipliers,
    NormConfig,
    at_least,
    refuse,
)
from bagu.nn.position_choices import (
    Alibi,
    LayerPositions,
    LongRopeScaling,
    Positions,
    Rope,
    Sinusoidal,
    T5Relative,
    YarnScaling,
    yarn_mscale,
)

FFNKind = Literal["gelu", "gelu_tanh", "gelu_quick", "relu2", "swiglu", "geglu", "geglu_tanh"]
GATED: tuple[FFNKind, ...] = ("swiglu", "geglu", "geglu_tanh")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Transformer. Sizes have no defaults; the other fields default to a Llama."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_len: int  # maximum sequence length

    norm: NormConfig = field(default_factory=NormConfig)
    positions: Positions = field(default_factory=Rope)
    layer_positions: LayerPositions | None = field(default=None, metadata=NEWER)  # layers whose positions differ
    multipliers: Multipliers = field(default=Multipliers(), metadata=NEWER)
    attention: Literal["softmax", "linear", "blocks"] = "softmax"
    blocks: BlockChoice = field(default=BlockChoice(), metadata=NEWER)  # with attention "blocks"
    mla: MLAConfig | None = None
    causal: bool = True
    windows: tuple[int | None, ...] = (None,)  # a pattern over the layers: attention window, the token itself included
    # RMSNorm of queries and keys: True is of each head (Qwen3), "width" is of all heads together (OLMo 2)
    qk_norm: bool | Literal["width"] = False
    # a learned logit per head in the softmax's denominator (gpt-oss)
    sinks: bool = field(default=False, metadata=NEWER)
    qkv_bias: bool = False
    out_bias: bool = False
    ffn: FFNKind = "swiglu"
    ffn_bias: bool = False
    gate_clamp: GateClamp | None = field(default=None, metadata=NEWER)  # with ffn "swiglu"
    moe: MoEConfig | None = None
    weight_norm: bool = False  # each row of a linear weight is a direction times a learned length
    dropout: float = 0.0  # on the embedding and on the output of each sublayer

    tie_embeddings: bool = False
    embedding_norm: bool = False  # BERT: a norm on the sum of the embeddings
    num_token_types: int = 0  # BERT: a learned vector per segment type, added to the embedding
    mlm_head: bool = False  # BERT: dense, GELU and norm before the head, and a bias in the head
    lm_head: bool = field(default=True, metadata=NEWER)  # False: a model that ends with its hidden states (BertModel)
    # one number per token instead of logits: a reward model, or a critic
    score_head: bool = field(default=False, metadata=NEWER)
    init_std: float = 0.02

    def __post_init__(self) -> None:
        at_least(self, 1, "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        at_least(self, 1, "intermediate_size", "max_len")
        at_least(self, 0, "num_token_types")
        self._check_heads()
        self._check_positions()
        self._check_windows()
        self._check_rest()
        self._check_output()

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            refuse(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}",
                "each KV head needs the same number of query heads",
            )
        mla = self.mla
        if mla is None:
            return
        if self.num_kv_heads != self.num_heads or self.head_dim != mla.nope_dim + mla.rope_dim:
            refuse(
                f"MLA with num_kv_heads = {self.num_kv_heads} and head_dim = {self.head_dim}",
                f"MLA has one KV head per head, and heads of nope_dim + rope_dim: set num_kv_heads={self.num_heads}, "
                f"head_dim={mla.nope_dim + mla.rope_dim}",
            )
        if self.qk_norm or self.qkv_bias:
            refuse("MLA with qk_norm or qkv_bias", "MLA normalizes its latents and has no such bias: leave both out")
        if self.sinks or self.layer_positions is not None:
            refuse("MLA with sinks or layer_positions", "it has neither: leave both out")
        if not isinstance(self.positions, Rope):
            refuse(f"MLA with {self.positions.kind!r} positions", "MLA needs RoPE for its rope_dim features: use Rope")

    def _check_positions(self) -> None:
        p = self.positions
        if isinstance(p, Rope):
            room = self.mla.rope_dim if self.mla is not None else self.head_dim
            turned = self.rope_dim
            if turned % 2 or not 2 <= turned <= room:
                refuse(f"RoPE rotates {turned} of {room} features", "use an even number, at most head_dim")
            if isinstance(p.scaling, LongRopeScaling):
                for name in ("short_factors", "long_factors"):
                    if (count := len(getattr(p.scaling, name))) != turned // 2:
                        refuse(f"{count} {name} for {turned} rotated features", "give one for each pair of features")
            if self.mla is not None and p.dim is not None:
                refuse(f"positions.dim = {p.dim} with MLA", "leave it out: mla.rope_dim sets the rotated features")
        if isinstance(p, Sinusoidal) and self.hidden_size % 2:
            refuse(f"sinusoidal positions with hidden_size = {self.hidden_size}", "use an even hidden_size")
        self._check_layer_positions()
        if self.attention == "linear" and (self.mla is not None or isinstance(p, (Alibi, T5Relative))):
            refuse(
                f"linear attention with {'MLA' if self.mla is not None else f'{p.kind!r} positions'}",
                "it has no scores for a bias: use rope, learned, sinusoidal or no positions, and no MLA",
            )

    def _check_layer_positions(self) -> None:
        some, p = self.layer_positions, self.positions
        if some is None:
            return
        wrong = [i for i in some.layers if not 0 <= i < self.num_layers]
        if wrong or not some.layers or len(set(some.layers)) in (self.num_layers, 0):
            refuse(
                f"layer_positions.layers = {some.layers} of {self.num_layers} layers",
                "layers count from 0; for all layers set positions",
            )
        same = isinstance(p, Rope) and (
            not isinstance(some.positions, Rope) or (some.positions.dim, some.positions.layout) == (p.dim, p.layout)
        )
        if not same or self.attention == "linear":
            refuse(
                f"layer_positions {some.positions.kind!r} with {p.kind!r} positions and {self.attention} attention",
                "it needs softmax attention and RoPE, with the same dim and layout in all layers that have RoPE",
            )

    def _check_windows(self) -> None:
        if not 1 <= len(self.windows) <= self.num_layers:
            refuse(
                f"windows has {len(self.windows)} entries for {self.num_layers} layers",
                "it is a pattern that repeats over the layers: give 1 to num_layers entries",
            )
        for w in self.windows:
            if w is not None and w < 1:
                refuse(f"windows has an entry {w}", "a token attends at least to itself: 1 or more, or None for all")
        if self.attention == "linear" and any(w is not None for w in self.windows):
            refuse("linear attention with a window", "its state sums over all earlier tokens: leave windows out")
        if self.attention == "blocks":
            others = {
                "MLA": self.mla is not None,
                "a window": any(w is not None for w in self.windows),
                "sinks": self.sinks,
                "bidirectional attention": not self.causal,
                f"{self.positions.kind!r} positions": isinstance(self.positions, (Alibi, T5Relative)),
            }
            if found := [name for name, has in others.items() if has]:
                refuse(f'attention = "blocks" with {found[0]}', 'leave one of them out, or use attention = "softmax"')

    def _check_rest(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            refuse(f"dropout = {self.dropout}", "use a probability from 0 to below 1")
        if not self.init_std > 0:
            refuse(f"init_std = {self.init_std}; expected more than 0", "0.02 is common")
        groups = self.norm.groups
        if groups is not None and self.hidden_size % groups:
            refuse(f"norm.groups = {groups} does not divide hidden_size = {self.hidden_size}", "choose a divisor")
        if self.sinks and self.attention == "linear":
            refuse("linear attention with sinks", "it has no softmax: leave sinks out")
        if self.gate_clamp is not None and self.ffn != "swiglu":
            refuse(f"gate_clamp with ffn = {self.ffn!r}", "it is a form of SwiGLU: set ffn to swiglu")
        if self.multipliers.residual != 1.0 and self.norm.placement not in ("pre", "post"):
            refuse(
                f"multipliers.residual with norm.placement = {self.norm.placement!r}",
                "a norm of the sublayer's output would undo it: use placement pre or post",
            )
        if self.moe is not None:
            wrong = [i for i in self.moe.dense_layers if not 0 <= i < self.num_layers]
            if wrong or len(set(self.moe.dense_layers)) == self.num_layers:
                refuse(
                    f"moe.dense_layers = {self.moe.dense_layers} of {self.num_layers} layers",
                    "layers count from 0, and at least one must have experts",
                )

    def _check_output(self) -> None:
        if not self.lm_head and (self.tie_embeddings or self.mlm_head or self.score_head):
            refuse(
                "lm_head is False, with tie_embeddings, mlm_head or score_head",
                "a model without a head has none of them: leave them out",
            )
        if self.mlm_head and self.causal:
            refuse("a masked-LM head on a causal model", "set causal=False, or leave mlm_head out")
        if self.score_head and self.mlm_head:
            refuse("a score head on a model with a masked-LM head", "a model has one head: leave one of them out")
        if self.norm.placement == "none" and (self.embedding_norm or self.mlm_head):
            refuse("norm.placement = 'none' with embedding_norm or mlm_head", "both contain a norm: leave them out")

    @property
    def group_size(self) -> int:
        """Number of query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def v_dim(self) -> int:
        """Size of a head's value."""
        return self.head_dim if self.mla is None else self.mla.v_dim

    @property
    def rope_dim(self) -> int:
        """Number of features of a head that RoPE rotates; 0 without RoPE."""
        if not isinstance(self.positions, Rope):
            return 0
        if self.mla is not None:
            return self.mla.rope_dim
        return self.head_dim if self.positions.dim is None else self.positions.dim

    @property
    def gated(self) -> bool:
        """Whether the FFN has a gate projection besides the up projection."""
        return self.ffn in GATED

    @property
    def final_norm(self) -> bool:
        """Whether there is a norm before the head."""
        return self.norm.placement in ("pre", "output", "sandwich")

    @property
    def untied_head(self) -> bool:
        """Whether the head has a weight of its own."""
        return self.lm_head and not self.tie_embeddings and not self.score_head

    @property
    def scale(self) -> float:
        """The factor of the attention scores, 1 / sqrt(head_dim) in most models."""
        scaling = self.positions.scaling if isinstance(self.positions, Rope) else None
        sharp = 1.0
        if self.mla is not None and isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
            sharp = yarn_mscale(scaling.factor, scaling.mscale_all_dim)
        if self.multipliers.attention is not None:
            return self.multipliers.attention
        return sharp * sharp / math.sqrt(self.head_dim)

    @property
    def longrope(self) -> LongRopeScaling | None:
        """The scaling of RoPE if its factors depend on the length."""
        scaling = self.positions.scaling if isinstance(self.positions, Rope) else None
        return scaling if isinstance(scaling, LongRopeScaling) and self.max_len > scaling.original_max_len else None

    def window(self, layer: int) -> int | None:
        """The attention window of this layer, the token itself included; None is unlimited."""
        return self.windows[layer % len(self.windows)]

    def has_other_positions(self, layer: int) -> bool:
        """Whether this layer has the positions of `layer_positions`."""
        return self.layer_positions is not None and layer in self.layer_positions.layers

    def experts(self, layer: int) -> MoEConfig | None:
        """The mixture of experts of this layer, or None if its FFN is dense."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe
