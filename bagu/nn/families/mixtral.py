"""Mixtral: a Mistral with a mixture of experts in every layer. The weights of a token's experts sum to 1."""

from collections.abc import Mapping
from typing import Any

from bagu.machine.hub import WeightsError
from bagu.nn.config import ModelConfig
from bagu.nn.families.core import Rule, experts, gate_up, same
from bagu.nn.families.decoder import DECODER, QKV, decoder, read_decoder, read_experts, write_decoder, write_experts
from bagu.nn.families.keys import UNUSED, Key, Read
from bagu.nn.families.rope import read_rope

LAYER = "model.layers.{layer}.block_sparse_moe"
EXPERTS = (
    Rule("blocks.{layer}.ffn.router.weight", f"{LAYER}.gate.weight"),
    Rule(
        "blocks.{layer}.ffn.gate_up",
        (f"{LAYER}.experts.{{expert}}.w1.weight", f"{LAYER}.experts.{{expert}}.w3.weight"),
        experts(gate_up),
    ),
    Rule("blocks.{layer}.ffn.down", f"{LAYER}.experts.{{expert}}.w2.weight", experts(same)),
)
KEYS: dict[str, Key] = {
    **DECODER,
    "num_key_value_heads": Read(int, 8, least=1),
    "rms_norm_eps": Read(float, 1e-5, above=0),
    "sliding_window": Read(int | None, None, least=1),
    "num_local_experts": Read(int, 8, least=1),
    "num_experts_per_tok": Read(int, 2, least=1),
    "router_aux_loss_coef": Read(float, 0.001),
    "router_jitter_noise": UNUSED,  # training only; bagu does not have it
    "output_router_logits": UNUSED,
}


def read(hf: Mapping[str, Any]) -> ModelConfig:
    fields = read_decoder(hf, positions=read_rope(hf, base=1_000_000.0))
    return ModelConfig(**fields, windows=(hf["sliding_window"],), moe=read_experts(hf))


def write(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        raise WeightsError("the model has no mixture of experts", hint="use the family mistral")
    return write_decoder(config) | write_experts(moe) | {"sliding_window": config.window(0)}


MIXTRAL = decoder(
    "mixtral",
    "MixtralForCausalLM",
    "MixtralForSequenceClassification",
    read,
    write,
    (*QKV, *EXPERTS),
    keys=KEYS,
    aliases={"num_experts": "num_local_experts"},
)
