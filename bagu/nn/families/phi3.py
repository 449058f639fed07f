"""Phi-3 and Phi-4 (both of model_type phi3): one tensor for q, k and v and one for gate and up; RoPE may rotate a part
of the features. The models for 128k tokens and Phi-4-mini have longrope: `LongRopeScaling` says which of its two lists
of factors is used.
"""

from collections.abc import Mapping
from typing import Any

from bagu.nn.config import LongRopeScaling, ModelConfig, Rope
from bagu.nn.families.core import Rule, fused_qkv
from bagu.nn.families.decoder import DECODER, decoder, read_decoder, write_decoder
from bagu.nn.families.keys import UNUSED, Key, Only, Read
from bagu.nn.families.rope import read_rope

LAYER = "model.layers.{layer}"
RULES = (
    Rule("blocks.{layer}.attention.qkv.weight", f"{LAYER}.self_attn.qkv_proj.weight", fused_qkv),
    Rule("blocks.{layer}.ffn.gate_up.weight", f"{LAYER}.mlp.gate_up_proj.weight"),
    Rule("blocks.{layer}.ffn.down.weight", f"{LAYER}.mlp.down_proj.weight"),
)
KEYS: dict[str, Key] = {
    **DECODER,
    "head_dim": Read(int, None, least=1),
    "rms_norm_eps": Read(float, 1e-5, above=0),
    "partial_rotary_factor": Read(float, None, above=0),
    "original_max_position_embeddings": Read(int, 4096, least=1),  # longrope only
    "sliding_window": Read(int | None, None, least=1),
    "resid_pdrop": Read(float, 0.0, least=0),
    "embd_pdrop": UNUSED,
    **dict.fromkeys(("attention_bias", "lm_head_bias", "mlp_bias"), Only(False)),  # in the files of Phi-4-mini
    "full_attn_mod": UNUSED,
    "interpolate_factor": UNUSED,
}


def read(hf: Mapping[str, Any]) -> ModelConfig:
    """`resid_pdrop` is the dropout."""
    fields = read_decoder(hf, positions=read_rope(hf, types=("default", "longrope")))
    return ModelConfig(**fields, windows=(hf["sliding_window"],), dropout=float(hf["resid_pdrop"]))


def write(config: ModelConfig) -> dict[str, Any]:
    original: dict[str, Any] = {}
    if isinstance(config.positions, Rope) and isinstance(config.positions.scaling, LongRopeScaling):
        original = {"original_max_position_embeddings": config.positions.scaling.original_max_len}
    return (
        write_decoder(config)
        | original
        | {
            "partial_rotary_factor": config.rope_dim / config.head_dim,
            "sliding_window": config.window(0),
            "resid_pdrop": config.dropout,
        }
    )


PHI3 = decoder("phi3", "Phi3ForCausalLM", "Phi3ForSequenceClassification", read, write, RULES, keys=KEYS)
