"""A tokenizer and a random model for tests of constrained decoding; it is imported where torch is."""

from __future__ import annotations

import json
from typing import Any

import torch

from bagu.data.tokenizer import BpeTokenizer
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "name": {"type": "string", "maxLength": 8}},
    "required": ["x", "name"],
    "additionalProperties": False,
}


def json_tokenizer() -> BpeTokenizer:
    """486 tokens, many of them with JSON punctuation inside."""
    rows = [json.dumps({"name": "hello world", "x": i, "tags": ["a", "b"]}) for i in range(200)]
    return BpeTokenizer.train(rows, vocab_size=600)


def constrained_model(tokenizer: BpeTokenizer, *, extra: int = 7) -> Transformer:
    """Its vocabulary has `extra` ids without a token, as padded checkpoints do."""
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size + extra, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        intermediate_size=48, max_len=512, init_std=0.2,
    )  # fmt: skip
    return init_weights(Transformer(config, dtype=torch.float32), 0).eval()


def constrained_engine(model: Transformer, tokenizer: BpeTokenizer, **settings: Any) -> Engine:
    chosen = {"num_blocks": 256, "block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 64} | settings
    return Engine(model, tokenizer, EngineConfig(**chosen))
