"""gpt-oss: attention sinks, windows in every second layer, experts with biases and a clamped SwiGLU.

Its files store the experts of a layer in one tensor, [in, out], with gate and up in alternating columns. The MXFP4
files of openai are dequantized when they are read: quantized_files.py.
"""

from collections.abc import Mapping
from typing import Any

import torch

from bagu.machine.hub import WeightsError
from bagu.nn.config import GateClamp, ModelConfig
from bagu.nn.families.core import Part, Rule
from bagu.nn.families.decoder import (
    DECODER,
    FULL,
    QKV,
    SLIDING,
    decoder,
    layer_windows,
    read_decoder,
    read_experts,
    write_decoder,
    write_experts,
    write_windows,
)
from bagu.nn.families.keys import UNUSED, Key, Read
from bagu.nn.families.rope import read_rope


def alternating(t: torch.Tensor, config: ModelConfig) -> list[Part]:
    """[E, 2F, D] or [E, 2F], gate first, as the file's [E, D, 2F] or [E, 2F], in which gate and up alternate."""
    pairs = t.unflatten(1, (2, -1)).transpose(1, 2)  # [E, F, 2, D]
    view = pairs if t.dim() == 2 else pairs.movedim(-1, 1)
    return [Part((view,), (*view.shape[:-2], t.shape[1]))]


def transposed(t: torch.Tensor, config: ModelConfig) -> list[Part]:
    return [Part((t.mT,), tuple(t.mT.shape))]


LAYER = "model.layers.{layer}"
RULES = (
    Rule("blocks.{layer}.attention.sinks", f"{LAYER}.self_attn.sinks"),
    Rule("blocks.{layer}.ffn.router.*", f"{LAYER}.mlp.router.*"),
    Rule("blocks.{layer}.ffn.gate_up", f"{LAYER}.mlp.experts.gate_up_proj", alternating),
    Rule("blocks.{layer}.ffn.into_bias", f"{LAYER}.mlp.experts.gate_up_proj_bias", alternating),
    Rule("blocks.{layer}.ffn.down", f"{LAYER}.mlp.experts.down_proj", transposed),
    Rule("blocks.{layer}.ffn.down_bias", f"{LAYER}.mlp.experts.down_proj_bias"),
)
YARN = {  # transformers' default of rope_parameters
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
KEYS: dict[str, Key] = {
    **DECODER,
    "num_key_value_heads": Read(int, 8, least=1),
    "head_dim": Read(int, 64, least=1),
    "rms_norm_eps": Read(float, 1e-5, above=0),
    "attention_bias": Read(bool, True),
    "sliding_window": Read(int | None, 128, least=1),
    "layer_types": Read(list | None, None),
    "num_local_experts": Read(int, 128, least=1),
    "num_experts_per_tok": Read(int, 4, least=1),
    "swiglu_alpha": Read(float, 1.702),
    "swiglu_limit": Read(float, 7.0, above=0),
    "router_aux_loss_coef": Read(float, 0.001),
    "hidden_act": UNUSED,  # the experts have their own activation
    # repeat other keys in openai's files
    **dict.fromkeys(("output_router_logits", "experts_per_token", "initial_context_length"), UNUSED),
}


def read(hf: Mapping[str, Any]) -> ModelConfig:
    num_layers, kinds = hf["num_hidden_layers"], hf["layer_types"]
    if kinds is None:
        kinds = [FULL if i % 2 else SLIDING for i in range(num_layers)]
    rope = dict(hf) | ({"rope_parameters": YARN} if hf["rope_parameters"] is None else {})
    bias = hf["attention_bias"]
    return ModelConfig(
        **read_decoder(hf, positions=read_rope(rope, base=150_000.0), ffn="swiglu"),
        windows=layer_windows(kinds, num_layers, hf["sliding_window"]),
        moe=read_experts(hf, router_bias=True),
        sinks=True,
        gate_clamp=GateClamp(alpha=float(hf["swiglu_alpha"]), limit=float(hf["swiglu_limit"])),
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=True,
    )


def write(config: ModelConfig) -> dict[str, Any]:
    moe, clamp = config.moe, config.gate_clamp
    if moe is None or clamp is None:
        raise WeightsError("the model has no mixture of experts with a clamped SwiGLU", hint="")
    windows = write_windows(config)
    written = write_decoder(config)
    return (
        written
        | write_experts(moe)
        | {
            # without a type the default of this family is YaRN
            "rope_scaling": written["rope_scaling"] or {"rope_type": "default"},
            "attention_bias": config.qkv_bias,
            "sliding_window": windows["sliding_window"] or 128,  # transformers needs one also where no layer uses it
            "layer_types": windows["layer_types"],
            "swiglu_alpha": clamp.alpha,
            "swiglu_limit": clamp.limit,
        }
    )


GPT_OSS = decoder(
    "gpt_oss",
    "GptOssForCausalLM",
    "GptOssForSequenceClassification",
    read,
    write,
    (*QKV, *RULES),
    keys=KEYS,
    aliases={"num_experts": "num_local_experts"},
)
