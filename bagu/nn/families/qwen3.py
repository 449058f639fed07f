"""Qwen3, dense and mixture of experts: queries and keys are normalized per head before RoPE."""

from collections.abc import Mapping
from typing import Any

from bagu.machine.hub import WeightsError
from bagu.nn.config import ModelConfig, MoEConfig
from bagu.nn.families.decoder import (
    ALL_WINDOWS,
    DECODER,
    DENSE,
    EXPERTS,
    QK_NORM,
    QKV,
    WINDOWS,
    decoder,
    read_decoder,
    read_windows,
    write_decoder,
    write_windows,
)
from bagu.nn.families.keys import SIZE, UNUSED, Key, Read

KEYS: dict[str, Key] = {
    **DECODER,
    **WINDOWS,
    "num_key_value_heads": Read(int | None, 32, least=1),
    "head_dim": Read(int, 128, least=1),
    "attention_bias": Read(bool, False),
}
MOE_KEYS: dict[str, Key] = {
    **DECODER,
    **ALL_WINDOWS,
    "num_key_value_heads": Read(int, 4, least=1),
    "attention_bias": Read(bool, False),
    "num_experts": SIZE,
    "num_experts_per_tok": SIZE,
    "moe_intermediate_size": SIZE,
    "norm_topk_prob": Read(bool, False),
    "mlp_only_layers": Read(list | None, None),
    "decoder_sparse_step": Read(int, 1, least=1),
    "router_aux_loss_coef": Read(float, 0.001),
    "output_router_logits": UNUSED,
}


def read(hf: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(**read_decoder(hf), **_attention(hf), windows=read_windows(hf))


def write(config: ModelConfig) -> dict[str, Any]:
    return write_decoder(config) | write_windows(config) | {"attention_bias": config.qkv_bias}


def read_moe(hf: Mapping[str, Any]) -> ModelConfig:
    """Layers are dense if `mlp_only_layers` lists them or `decoder_sparse_step` skips them."""
    named, step = hf["mlp_only_layers"] or (), hf["decoder_sparse_step"]
    moe = MoEConfig(
        num_experts=hf["num_experts"],
        top_k=hf["num_experts_per_tok"],
        expert_size=hf["moe_intermediate_size"],
        dense_layers=tuple(i for i in range(hf["num_hidden_layers"]) if i in named or (i + 1) % step),
        scoring="softmax",
        normalize_top_k=hf["norm_topk_prob"],
        aux_weight=float(hf["router_aux_loss_coef"]) or None,
    )
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    return ModelConfig(**read_decoder(hf), **_attention(hf), windows=(window,), moe=moe)


def write_moe(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        raise WeightsError("the model has no mixture of experts", hint="use the family qwen3")
    return write_decoder(config) | {
        "attention_bias": config.qkv_bias,
        "use_sliding_window": config.window(0) is not None,
        "sliding_window": config.window(0),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_size,
        "mlp_only_layers": list(moe.dense_layers),
        "decoder_sparse_step": 1,
        "norm_topk_prob": moe.normalize_top_k,
        "router_aux_loss_coef": moe.aux_weight or 0.0,
    }


def _attention(hf: Mapping[str, Any]) -> dict[str, Any]:
    bias = hf["attention_bias"]
    return {"qk_norm": True, "qkv_bias": bias, "out_bias": bias}


QWEN3 = decoder(
    "qwen3", "Qwen3ForCausalLM", "Qwen3ForSequenceClassification", read, write, (*QKV, *QK_NORM, *DENSE), keys=KEYS
)
QWEN3_MOE = decoder(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "Qwen3MoeForSequenceClassification",
    read_moe,
    write_moe,
    (*QKV, *QK_NORM, *DENSE, *EXPERTS),
    keys=MOE_KEYS,
    aliases={"num_local_experts": "num_experts"},  # transformers 5 writes the first, 4 the second
)
