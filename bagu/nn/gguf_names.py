"""Names and metadata of GGUF files for Llama, Qwen2 and Qwen3, in both directions.

GGUF's keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bagu.machine.hub import WeightsError

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # the same names as config.json's model_type
NAMES = {  # ours of GGUF -> Hugging Face's; `blk.{layer}.` and `model.layers.{layer}.` stand before the last ten
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = ("token_embd", "output_norm", "output")
THEIRS = {theirs: ours for ours, theirs in NAMES.items()}
SIZES = {  # metadata, without the architecture -> key of config.json
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
}
OPTIONAL = {"attention.head_count_kv", "attention.key_length", "rope.freq_base"}


def hf_name(name: str, path: Path) -> str:
    """The Hugging Face name of a tensor of a GGUF file."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in NAMES or (found[1] is None) != (found[2] in TOP):
        raise WeightsError(
            f"{path} has a tensor {name}, which bagu does not know", hint=f"supported: {', '.join(ARCHITECTURES)}"
        )
    prefix = "" if found[1] is None else f"model.layers.{found[1]}."
    return f"{prefix}{NAMES[found[2]]}.{found[3]}"


def gguf_name(name: str) -> str:
    """The name in a GGUF file of a tensor with this Hugging Face name."""
    found = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
    if found is None or found[2] not in THEIRS:
        raise WeightsError(f"GGUF has no name for the tensor {name}", hint="export the model as safetensors")
    prefix = "" if found[1] is None else f"blk.{found[1]}."
    return f"{prefix}{THEIRS[found[2]]}.{found[3]}"


def to_halves(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [heads, D / 2, 2] of RoPE in neighbouring pairs as [heads, 2, D / 2]: feature i rotates with i + D / 2."""
    return w.view(heads, -1, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def to_pairs(w: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `to_halves`."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def hf_config(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path) -> dict[str, Any]:
    """The model of a GGUF file as a config.json."""
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise WeightsError(
            f"{path} holds a model of architecture {kind!r}", hint=f"bagu reads GGUF of {', '.join(ARCHITECTURES)}"
        )
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in shapes or "rope_factors_long.weight" in shapes:
        raise WeightsError(
            f"{path} scales RoPE ({scaling if scaling != 'none' else 'by a tensor of factors'})",
            hint="use the safetensors of this model: a GGUF file does not hold the settings of the scaling",
        )
    hf: dict[str, Any] = {"model_type": kind}
    for key, theirs in SIZES.items():
        value = metadata.get(f"{kind}.{key}")
        if value is None and key not in OPTIONAL:
            raise WeightsError(f"{path} lacks {kind}.{key}", hint="write it again with a current llama.cpp")
        if value is not None:
            # fp32 in the file: 1e-5 would be 9.99999975e-06
            hf[theirs] = float(f"{value:.7g}") if isinstance(value, float) else value
    hf.setdefault("num_key_value_heads", hf["num_attention_heads"])
    if "token_embd.weight" not in shapes:
        raise WeightsError(f"{path} has no token_embd.weight", hint="the file may be incomplete: download it again")
    hf["vocab_size"] = shapes["token_embd.weight"][0]
    hf["tie_word_embeddings"] = "output.weight" not in shapes
    if kind != "qwen2":  # it always has biases on q, k and v
        hf["attention_bias"] = "blk.0.attn_q.bias" in shapes
    return hf


def gguf_metadata(hf: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """The model of a config.json that bagu wrote, as metadata of a GGUF file."""
    kind = hf["model_type"]
    if kind not in ARCHITECTURES:
        raise WeightsError(
            f"a model of family {kind} cannot be written as GGUF", hint=f"bagu writes {', '.join(ARCHITECTURES)}"
        )
    refused = {
        "RoPE scaling": (hf.get("rope_scaling") or hf.get("rope_parameters", {}).get("rope_type", "default"))
        not in ("default", None),
        "sliding windows": bool(hf.get("use_sliding_window")),
        "biases of its feed-forward layers": bool(hf.get("mlp_bias")),
    }
    if lacks := [name for name, present in refused.items() if present]:
        raise WeightsError(f"GGUF of {kind} cannot hold {lacks[0]}", hint="export the model as safetensors")
    values = {f"{kind}.{key}": hf[theirs] for key, theirs in SIZES.items() if theirs in hf}
    return values | {
        f"{kind}.attention.key_length": head_dim,
        f"{kind}.attention.value_length": head_dim,
        f"{kind}.rope.dimension_count": head_dim,
        f"{kind}.vocab_size": hf["vocab_size"],
    }
