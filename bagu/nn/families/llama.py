"""Llama 2 and 3 and SmolLM, which are all of model_type llama, and Mistral, which has a window and no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bagu.nn.config import ModelConfig
from bagu.nn.families.decoder import DENSE, QKV, decoder, read_decoder, write_decoder

__all__ = ["LLAMA", "MISTRAL"]


def read_llama(hf: Mapping[str, Any]) -> ModelConfig:
    bias = hf.get("attention_bias", False)
    return ModelConfig(**read_decoder(hf), qkv_bias=bias, out_bias=bias, ffn_bias=hf.get("mlp_bias", False))


def write_llama(config: ModelConfig) -> dict[str, Any]:
    return write_decoder(config) | {"attention_bias": config.qkv_bias, "mlp_bias": config.ffn_bias}


def read_mistral(hf: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(**read_decoder(hf), windows=(hf.get("sliding_window"),))


def write_mistral(config: ModelConfig) -> dict[str, Any]:
    return write_decoder(config) | {"sliding_window": config.window(0)}


LLAMA = decoder("llama", "LlamaForCausalLM", read_llama, write_llama, (*QKV, *DENSE))
MISTRAL = decoder("mistral", "MistralForCausalLM", read_mistral, write_mistral, (*QKV, *DENSE))
