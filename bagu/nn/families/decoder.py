"""The keys of config.json and the tensor names that the families derived from Llama share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bagu.nn.config import FFNKind, ModelConfig, MoEConfig, NormConfig, Positions
from bagu.nn.families.core import Family, Rule, experts, gate_up, qkv, same
from bagu.nn.families.keys import INIT_STD, SHARED, SIZE, UNUSED, Key, Keys, Only, Read, refuse_value
from bagu.nn.families.rope import ROPE, read_rope, write_rope

GATES: dict[str, FFNKind] = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
FULL, SLIDING = "full_attention", "sliding_attention"

DECODER: dict[str, Key] = {  # defaults that differ between families are in their own files
    **SHARED,
    **ROPE,
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "num_hidden_layers": SIZE,
    "num_attention_heads": SIZE,
    "num_key_value_heads": Read(int | None, None, least=1),
    "head_dim": Read(int | None, None, least=1),
    "intermediate_size": SIZE,
    "max_position_embeddings": SIZE,
    "rms_norm_eps": Read(float, 1e-6, above=0),
    "hidden_act": Read(str, "silu"),
    "tie_word_embeddings": Read(bool, False),
    "initializer_range": INIT_STD,
    "attention_dropout": UNUSED,  # training only; bagu does not have this dropout
    "is_causal": Only(True),
    "is_decoder": UNUSED,
    "layer_types": Only(None),
}
ALL_WINDOWS: dict[str, Key] = {  # the same window in all layers
    "use_sliding_window": Read(bool, False),
    "sliding_window": Read(int | None, 4096, least=1),
    "max_window_layers": UNUSED,
    "use_mrope": Only(False),
}
WINDOWS: dict[str, Key] = {  # a window in some layers
    **ALL_WINDOWS,
    "max_window_layers": Read(int, 28),
    "layer_types": Read(list | None, None),
}

OUTER = (
    Rule("embedding.weight", "model.embed_tokens.weight"),
    Rule("norm.weight", "model.norm.weight"),
    Rule("head.weight", "lm_head.weight"),
    Rule("score.weight", "score.weight"),
    Rule("blocks.{layer}.attention.out.*", "model.layers.{layer}.self_attn.o_proj.*"),
)
PRE_NORMS = (
    Rule("blocks.{layer}.attention_norm.weight", "model.layers.{layer}.input_layernorm.weight"),
    Rule("blocks.{layer}.ffn_norm.weight", "model.layers.{layer}.post_attention_layernorm.weight"),
)
QK_NORM = (
    Rule("blocks.{layer}.attention.q_norm.weight", "model.layers.{layer}.self_attn.q_norm.weight"),
    Rule("blocks.{layer}.attention.k_norm.weight", "model.layers.{layer}.self_attn.k_norm.weight"),
)
QKV = (
    Rule(
        "blocks.{layer}.attention.qkv.*",
        (
            "model.layers.{layer}.self_attn.q_proj.*",
            "model.layers.{layer}.self_attn.k_proj.*",
            "model.layers.{layer}.self_attn.v_proj.*",
        ),
        qkv,
    ),
)
DENSE = (
    Rule(
        "blocks.{layer}.ffn.gate_up.*",
        ("model.layers.{layer}.mlp.gate_proj.*", "model.layers.{layer}.mlp.up_proj.*"),
        gate_up,
    ),
    Rule("blocks.{layer}.ffn.down.*", "model.layers.{layer}.mlp.down_proj.*"),
)
EXPERTS = (
    Rule("blocks.{layer}.ffn.router.weight", "model.layers.{layer}.mlp.gate.weight"),
    Rule(
        "blocks.{layer}.ffn.gate_up",
        (
            "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
            "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
        ),
        experts(gate_up),
    ),
    Rule("blocks.{layer}.ffn.down", "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", experts(same)),
)


def decoder(
    name: str,
    architecture: str,
    classifier: str | None,
    read: Callable[[Mapping[str, Any]], ModelConfig],
    write: Callable[[ModelConfig], dict[str, Any]],
    rules: Sequence[Rule],
    *,
    keys: Keys,
    norms: Sequence[Rule] = PRE_NORMS,
    aliases: Mapping[str, str] | None = None,
    unused: Sequence[str] = (),
) -> Family:
    """A family with Llama's prefix, tied head and obsolete tensors."""
    return Family(
        name=name,
        architecture=architecture,
        classifier=classifier,
        keys=keys,
        read=read,
        write=write,
        rules=(*OUTER, *norms, *rules),
        prefix="model.",
        aliases=aliases or {},
        unused=(r".*\.rotary_emb\.inv_freq", *unused),  # a buffer that transformers wrote before 4.32
        copies={"lm_head.weight": "model.embed_tokens.weight"},
    )


def read_act(hf: Mapping[str, Any], key: str = "hidden_act") -> FFNKind:
    if hf[key] not in GATES:
        refuse_value("config.json", key, hf[key], ", ".join(GATES))
    return GATES[hf[key]]


def read_decoder(
    hf: Mapping[str, Any], *, positions: Positions | None = None, ffn: FFNKind | None = None
) -> dict[str, Any]:
    """The fields of ModelConfig that these families read in the same way, from the values of `DECODER`. A family that
    reads RoPE or the activation differently passes them."""
    heads = hf["num_attention_heads"]
    return {
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": hf["num_key_value_heads"] or heads,
        "head_dim": hf["head_dim"] or hf["hidden_size"] // heads,
        "intermediate_size": hf["intermediate_size"],
        "max_len": hf["max_position_embeddings"],
        "norm": NormConfig(kind="rms", placement="pre", eps=float(hf["rms_norm_eps"])),
        "positions": read_rope(hf) if positions is None else positions,
        "ffn": read_act(hf) if ffn is None else ffn,
        "tie_embeddings": hf["tie_word_embeddings"],
        "init_std": float(hf["initializer_range"]),
    }


def write_decoder(
    config: ModelConfig, *, rope: Mapping[str, Any] | None = None, act: str = "hidden_act"
) -> dict[str, Any]:
    """The keys that `read_decoder` reads. `rope` are the keys of RoPE, and `act` is the name of the activation's key,
    in a family that differs in them."""
    acts = {kind: act for act, kind in GATES.items()}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_len,
        "rms_norm_eps": config.norm.eps,
        act: acts.get(config.ffn, config.ffn),
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        **(write_rope(config) if rope is None else rope),
    }


def write_experts(moe: MoEConfig) -> dict[str, Any]:
    """The keys of a mixture of experts in every layer, as in Mixtral and gpt-oss."""
    return {
        "intermediate_size": moe.expert_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.aux_weight or 0.0,
    }


def read_experts(hf: Mapping[str, Any], *, router_bias: bool = False) -> MoEConfig:
    return MoEConfig(
        num_experts=hf["num_local_experts"],
        top_k=hf["num_experts_per_tok"],
        expert_size=hf["intermediate_size"],
        router_bias=router_bias,
        aux_weight=float(hf["router_aux_loss_coef"]) or None,
    )


def read_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Qwen's windows: layers from `max_window_layers` on have one, if any; newer files list the type of each layer."""
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    num_layers, kinds = hf["num_hidden_layers"], hf["layer_types"]
    if kinds is None:
        first = num_layers if window is None else hf["max_window_layers"]
        kinds = [SLIDING if i >= first else FULL for i in range(num_layers)]
    return layer_windows(kinds, num_layers, window)


def layer_windows(kinds: Sequence[Any], num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """The windows of layers of these types, the values of `layer_types`."""
    if len(kinds) != num_layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        refuse_value("config.json", "layer_types", kinds, f"{FULL!r} or {SLIDING!r} for each of {num_layers} layers")
    if SLIDING not in kinds:
        return (None,)
    if window is None:
        refuse_value("config.json", "layer_types", kinds, f"{FULL!r} without a sliding_window in use")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """The keys that `read_windows` reads. `max_window_layers` is for readers without `layer_types`."""
    windows = [config.window(i) for i in range(config.num_layers)]
    return {
        "use_sliding_window": any(windows),
        "sliding_window": max((w for w in windows if w is not None), default=None),
        "max_window_layers": next((i for i, w in enumerate(windows) if w is not None), config.num_layers),
        "layer_types": [FULL if w is None else SLIDING for w in windows],
    }
