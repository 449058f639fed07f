"""A small causal model with a byte-level tokenizer on a real engine, for evaluations."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from bagu.data.chat import ChatEncoder
from bagu.data.chat_template import DEFAULT_TEMPLATE
from bagu.data.tokenizer import BpeTokenizer
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.recipes.eval_models import EngineModel
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine

TEXT = [
    "def add(a, b):\n    return a + b\n",
    "the quick brown fox jumps over the lazy dog",
    "question answer colour red",
]


@cache
def tokenizer() -> BpeTokenizer:
    return BpeTokenizer.train(TEXT * 4, vocab_size=320, chat_template=DEFAULT_TEMPLATE)


@cache
def transformer(seed: int = 0, max_len: int = 128) -> Transformer:
    config = ModelConfig(
        vocab_size=tokenizer().vocab_size, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        intermediate_size=48, max_len=max_len, init_std=0.2,
    )  # fmt: skip
    return init_weights(Transformer(config, dtype=torch.float32), seed).eval()


def real_model(seed: int = 0, *, max_len: int = 128, **settings: Any) -> EngineModel:
    chosen = {"num_blocks": 256, "block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64} | settings
    engine = Engine(transformer(seed, max_len), tokenizer(), EngineConfig(**chosen))
    return EngineModel(engine, tokenizer(), ChatEncoder(tokenizer()), f"small-{seed}")


def naive_logprobs(model: EngineModel, ids: list[int], start: int) -> list[float]:
    """By one forward of the whole sequence."""
    tokens, T = torch.tensor(ids), len(ids)
    network = model.engine.model
    with torch.no_grad():
        hidden = network(tokens, torch.arange(T), torch.tensor([0, T], dtype=torch.int32), T).hidden
        logprobs = network.logits(hidden).double().log_softmax(-1)
    return [float(logprobs[t - 1, ids[t]]) for t in range(start, T)]
