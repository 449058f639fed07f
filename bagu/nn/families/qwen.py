"""Qwen2 and Qwen2.5: a Llama with a bias on queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from bagu.nn.config import ModelConfig
from bagu.nn.families.decoder import (
    DECODER,
    DENSE,
    QKV,
    WINDOWS,
    decoder,
    read_decoder,
    read_windows,
    write_decoder,
    write_windows,
)
from bagu.nn.families.keys import Key, Only, Read

KEYS: dict[str, Key] = {
    **DECODER,
    **WINDOWS,
    "num_key_value_heads": Read(int | None, 32, least=1),
    "head_dim": Read(int, None, least=1),
    "attention_bias": Only(True),  # ignored by transformers, whose Qwen2 always has these biases
}


def read(hf: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(**read_decoder(hf), qkv_bias=True, windows=read_windows(hf))


def write(config: ModelConfig) -> dict[str, Any]:
    return write_decoder(config) | write_windows(config)


QWEN2 = decoder("qwen2", "Qwen2ForCausalLM", "Qwen2ForSequenceClassification", read, write, (*QKV, *DENSE), keys=KEYS)
