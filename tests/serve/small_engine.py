"""Small models with every kind of attention, and engines with a few blocks."""

from __future__ import annotations

from typing import Any

import torch

from bagu.nn.config import (
    Alibi,
    GateClamp,
    LayerPositions,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    Multipliers,
    NormConfig,
    Rope,
)
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.nn.position_choices import Learned, NoPositions
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.types import Tokenizer

MODELS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha, tied": {"num_kv_heads": 4, "tie_embeddings": True},
    "mqa, QK norm": {"num_kv_heads": 1, "qk_norm": True},
    "windows in all layers": {"windows": (5, 9)},
    "windows in some": {"windows": (4, None)},
    "biases, gelu": {
        "qkv_bias": True,
        "out_bias": True,
        "ffn": "gelu",
        "ffn_bias": True,
        "positions": Rope(base=100.0),
    },
    "learned, layer norm": {"positions": Learned(), "norm": NormConfig(kind="layer", bias=True)},
    "alibi": {"positions": Alibi()},
    "output norm, QK norm over the width": {"norm": NormConfig(placement="output"), "qk_norm": "width"},
    "two ropes, sandwich": {
        "norm": NormConfig(placement="sandwich", unit_offset=True),
        "qk_norm": True,
        "windows": (4, None),
        "layer_positions": LayerPositions(layers=(0, 2), positions=Rope(base=100.0)),
        "multipliers": Multipliers(embedding=32**0.5, attention=0.3),
    },
    "nope, multipliers": {
        "layer_positions": LayerPositions(layers=(1,), positions=NoPositions()),
        "multipliers": Multipliers(embedding=2.0, residual=0.7, logits_divisor=3.0),
    },
    "part of the features rotated": {"positions": Rope(dim=4)},
    "sinks, experts": {
        "sinks": True,
        "windows": (4, None),
        "gate_clamp": GateClamp(limit=1.0),
        "ffn_bias": True,
        "moe": MoEConfig(num_experts=4, top_k=2, expert_size=24, router_bias=True),
    },
    "mla": {"mla": MLAConfig(kv_rank=8, nope_dim=4, v_dim=6, rope_dim=4), "num_kv_heads": 4, "head_dim": 8},
}


def small_model(kind: str = "gqa", dtype: torch.dtype = torch.float32) -> Transformer:
    """97 tokens, 3 layers, 128 positions; large weights, so that the most probable token leads by a margin."""
    sizes: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "max_len": 128, "init_std": 0.2,
    }  # fmt: skip
    return init_weights(Transformer(ModelConfig(**sizes | MODELS[kind]), dtype=dtype), 0).eval()


def small_engine(model: Transformer, tokenizer: Tokenizer | None = None, **settings: Any) -> Engine:
    chosen = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64} | settings
    return Engine(model, tokenizer, EngineConfig(**chosen))
