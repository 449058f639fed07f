"""Granite 3: a Llama with constant factors of the embedding, the scores, the sublayers and the logits."""

from collections.abc import Mapping
from typing import Any

from bagu.nn.config import ModelConfig, Multipliers
from bagu.nn.families.decoder import DECODER, DENSE, QKV, decoder, read_decoder, write_decoder
from bagu.nn.families.keys import Key, Read

KEYS: dict[str, Key] = {
    **DECODER,
    "head_dim": Read(int, None, least=1),
    "attention_bias": Read(bool, False),
    "mlp_bias": Read(bool, False),
    "embedding_multiplier": Read(float, 1.0),
    "attention_multiplier": Read(float, 1.0, above=0),
    "residual_multiplier": Read(float, 1.0),
    "logits_scaling": Read(float, 1.0, above=0),
}


def read(hf: Mapping[str, Any]) -> ModelConfig:
    bias = hf["attention_bias"]
    multipliers = Multipliers(
        embedding=float(hf["embedding_multiplier"]),
        attention=float(hf["attention_multiplier"]),
        residual=float(hf["residual_multiplier"]),
        logits_divisor=float(hf["logits_scaling"]),
    )
    return ModelConfig(
        **read_decoder(hf), multipliers=multipliers, qkv_bias=bias, out_bias=bias, ffn_bias=hf["mlp_bias"]
    )


def write(config: ModelConfig) -> dict[str, Any]:
    m = config.multipliers
    return write_decoder(config) | {
        "embedding_multiplier": m.embedding,
        "attention_multiplier": config.scale,
        "residual_multiplier": m.residual,
        "logits_scaling": m.logits_divisor,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.ffn_bias,
    }


GRANITE = decoder("granite", "GraniteForCausalLM", None, read, write, (*QKV, *DENSE), keys=KEYS)
