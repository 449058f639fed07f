"""What the descendants of Llama share: the keys of config.json, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bagu.nn.config import FFNKind, ModelConfig, NormConfig
from bagu.nn.families.core import Family, Rule, experts, gate_up, qkv, same
from bagu.nn.families.rope import read_rope, write_rope
from bagu.nn.hub import WeightsError

__all__ = [
    "DENSE",
    "EXPERTS",
    "OUTER",
    "QKV",
    "decoder",
    "read_decoder",
    "read_windows",
    "write_decoder",
    "write_windows",
]

GATES: dict[str, FFNKind] = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}

OUTER = (
    Rule("embedding.weight", "model.embed_tokens.weight"),
    Rule("norm.weight", "model.norm.weight"),
    Rule("head.weight", "lm_head.weight"),
    Rule("blocks.{layer}.attention_norm.weight", "model.layers.{layer}.input_layernorm.weight"),
    Rule("blocks.{layer}.ffn_norm.weight", "model.layers.{layer}.post_attention_layernorm.weight"),
    Rule("blocks.{layer}.attention.out.*", "model.layers.{layer}.self_attn.o_proj.*"),
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
    read: Callable[[Mapping[str, Any]], ModelConfig],
    write: Callable[[ModelConfig], dict[str, Any]],
    rules: Sequence[Rule],
    *,
    wants: Mapping[str, Any] | None = None,
    unused: Sequence[str] = (),
) -> Family:
    """A family with the prefix, the relics and the tied head of Llama's."""
    return Family(
        name=name,
        architecture=architecture,
        read=read,
        write=write,
        rules=(*OUTER, *rules),
        prefix="model.",
        wants=wants or {},
        unused=(r".*\.rotary_emb\.inv_freq", *unused),  # a buffer that transformers wrote before 4.32
        copies={"lm_head.weight": "model.embed_tokens.weight"},
    )


def read_decoder(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig that these families read alike. Dropout of the attention weights is not known here."""
    act = hf.get("hidden_act", "silu")
    if act not in GATES:
        raise WeightsError(f"config.json has hidden_act {act!r}", hint=f"known here: {', '.join(GATES)}")
    heads = hf["num_attention_heads"]
    return {
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
        "intermediate_size": hf["intermediate_size"],
        "max_len": hf["max_position_embeddings"],
        "norm": NormConfig(kind="rms", placement="pre", eps=float(hf.get("rms_norm_eps", 1e-6))),
        "positions": read_rope(hf),
        "ffn": GATES[act],
        "tie_embeddings": hf.get("tie_word_embeddings", False),
        "init_std": float(hf.get("initializer_range", 0.02)),
    }


def write_decoder(config: ModelConfig) -> dict[str, Any]:
    """The keys that `read_decoder` reads."""
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
        "hidden_act": acts.get(config.ffn, config.ffn),
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        **write_rope(config),
    }


def read_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Qwen's windows: layers from `max_window_layers` on have one, if any do; newer files name each layer's kind."""
    window = hf.get("sliding_window") if hf.get("use_sliding_window", False) else None
    if window is None:
        return (None,)
    first, kinds = hf.get("max_window_layers", 28), hf.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(hf["num_hidden_layers"])]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """The keys that `read_windows` reads."""
    windows = [config.window(i) for i in range(config.num_layers)]
    return {
        "use_sliding_window": any(windows),
        "sliding_window": max((w for w in windows if w is not None), default=None),
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }
