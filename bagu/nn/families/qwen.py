"""Qwen2 and Qwen2.5: a Llama with a bias on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bagu.nn.config import ModelConfig
from bagu.nn.families.decoder import DENSE, QKV, decoder, read_decoder, read_windows, write_decoder, write_windows

__all__ = ["QWEN2"]


def read(hf: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(**read_decoder(hf), qkv_bias=True, windows=read_windows(hf))


def write(config: ModelConfig) -> dict[str, Any]:
    return write_decoder(config) | write_windows(config)


QWEN2 = decoder("qwen2", "Qwen2ForCausalLM", read, write, (*QKV, *DENSE))
