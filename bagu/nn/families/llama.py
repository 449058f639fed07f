"""Llama 2 and 3 and SmolLM, all of model_type llama, and Mistral, which has a window and no biases."""

from collections.abc import Mapping
from typing import Any

from bagu.nn.config import ModelConfig
from bagu.nn.families.decoder import DECODER, DENSE, QKV, decoder, read_decoder, write_decoder
from bagu.nn.families.keys import UNUSED, Key, Only, Read

LLAMA_KEYS: dict[str, Key] = {
    **DECODER,
    "attention_bias": Read(bool, False),
    "mlp_bias": Read(bool, False),
    "pretraining_tp": UNUSED,  # splits a matmul into this many parts
    "sliding_window": Only(None),
    "rope_interleaved": Only(False),  # in SmolLM's files
    "is_llama_config": UNUSED,
    "max_sequence_length": UNUSED,  # in the first conversions of Llama, besides max_position_embeddings
}
MISTRAL_KEYS: dict[str, Key] = {
    **DECODER,
    "num_key_value_heads": Read(int | None, 8, least=1),
    "sliding_window": Read(int | None, 4096, least=1),
}


def read_llama(hf: Mapping[str, Any]) -> ModelConfig:
    bias = hf["attention_bias"]
    return ModelConfig(**read_decoder(hf), qkv_bias=bias, out_bias=bias, ffn_bias=hf["mlp_bias"])


def write_llama(config: ModelConfig) -> dict[str, Any]:
    return write_decoder(config) | {"attention_bias": config.qkv_bias, "mlp_bias": config.ffn_bias}


def read_mistral(hf: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(**read_decoder(hf), windows=(hf["sliding_window"],))


def write_mistral(config: ModelConfig) -> dict[str, Any]:
    return write_decoder(config) | {"sliding_window": config.window(0)}


LLAMA = decoder(
    "llama",
    "LlamaForCausalLM",
    "LlamaForSequenceClassification",
    read_llama,
    write_llama,
    (*QKV, *DENSE),
    keys=LLAMA_KEYS,
)
MISTRAL = decoder(
    "mistral",
    "MistralForCausalLM",
    "MistralForSequenceClassification",
    read_mistral,
    write_mistral,
    (*QKV, *DENSE),
    keys=MISTRAL_KEYS,
)
