"""OLMo 2: the norm is on the output of each sublayer, and QK norm is over all heads together."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bagu.nn.config import ModelConfig
from bagu.nn.families.core import Rule
from bagu.nn.families.decoder import DECODER, DENSE, QK_NORM, QKV, decoder, read_decoder, write_decoder
from bagu.nn.families.keys import Key, Read

NORMS = (
    Rule("blocks.{layer}.attention_norm.weight", "model.layers.{layer}.post_attention_layernorm.weight"),
    Rule("blocks.{layer}.ffn_norm.weight", "model.layers.{layer}.post_feedforward_layernorm.weight"),
)
KEYS: dict[str, Key] = {
    **DECODER,
    "head_dim": Read(int, None, least=1),
    "rms_norm_eps": Read(float, 1e-5, above=0),
    "attention_bias": Read(bool, False),
}


def read(hf: Mapping[str, Any]) -> ModelConfig:
    fields, bias = read_decoder(hf), hf["attention_bias"]
    fields["norm"] = replace(fields["norm"], placement="output")
    return ModelConfig(**fields, qk_norm="width", qkv_bias=bias, out_bias=bias)


def write(config: ModelConfig) -> dict[str, Any]:
    return write_decoder(config) | {"attention_bias": config.qkv_bias}


OLMO2 = decoder(
    "olmo2",
    "Olmo2ForCausalLM",
    "Olmo2ForSequenceClassification",
    read,
    write,
    (*QKV, *QK_NORM, *DENSE),
    keys=KEYS,
    norms=NORMS,
)
