"""The models that `--model` names: bagu's presets, well-known published shapes, and config.json files."""

import json
from dataclasses import replace
from pathlib import Path

from bagu.config import ConfigError, from_dict
from bagu.errors import UnknownName
from bagu.nn.config import MLAConfig, ModelConfig, MoEConfig, NormConfig
from bagu.nn.families import family_of
from bagu.nn.position_choices import Learned
from bagu.nn.presets import PRESETS

_8B = PRESETS["llama_8b"]
_LAYER_NORM = NormConfig(kind="layer", eps=1e-5, bias=True)
MODELS: dict[str, ModelConfig] = {
    **PRESETS,
    "llama3-8b": _8B,
    "llama3-70b": replace(_8B, hidden_size=8192, num_layers=80, num_heads=64, intermediate_size=28_672),
    "llama3-405b": replace(_8B, hidden_size=16_384, num_layers=126, num_heads=128, intermediate_size=53_248),
    "llama2-7b": replace(_8B, vocab_size=32_000, num_kv_heads=32, intermediate_size=11_008, max_len=4096),
    "llama2-13b": replace(
        _8B, vocab_size=32_000, hidden_size=5120, num_layers=40, num_heads=40, num_kv_heads=40,
        intermediate_size=13_824, max_len=4096,
    ),
    "qwen3-8b": replace(_8B, vocab_size=151_936, num_layers=36, intermediate_size=12_288, qk_norm=True),
    "qwen3-32b": replace(
        _8B, vocab_size=151_936, hidden_size=5120, num_layers=64, num_heads=64, intermediate_size=25_600, qk_norm=True
    ),
    "gpt3-175b": ModelConfig(
        vocab_size=51_200, hidden_size=12_288, num_layers=96, num_heads=96, num_kv_heads=96, head_dim=128,
        intermediate_size=49_152, max_len=2048, ffn="gelu_tanh", positions=Learned(), tie_embeddings=True,
        norm=_LAYER_NORM, qkv_bias=True, out_bias=True, ffn_bias=True,
    ),
    "mixtral-8x7b": replace(
        _8B, vocab_size=32_000, moe=MoEConfig(num_experts=8, top_k=2, expert_size=14_336), max_len=32_768
    ),
    "deepseek-v3": ModelConfig(
        vocab_size=129_280, hidden_size=7168, num_layers=61, num_heads=128, num_kv_heads=128, head_dim=192,
        intermediate_size=18_432, max_len=4096,
        mla=MLAConfig(kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128, q_rank=1536),
        moe=MoEConfig(num_experts=256, top_k=8, expert_size=2048, num_shared=1, dense_layers=(0, 1, 2)),
    ),
}  # fmt: skip


def model_of(name: str) -> ModelConfig:
    """A model by name, or the one that a config.json (or its folder) describes: of Hugging Face, or of a bagu run."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return _read(path)
    key = name.lower()
    for known in (key, key.replace("-", "_"), key.replace("_", "-")):
        if known in MODELS:
            return MODELS[known]
    raise UnknownName.among("model", key, MODELS)


def _read(path: Path) -> ModelConfig:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {type(data).__name__}; expected an object", hint="give a config.json")
    if "model_type" in data:
        return family_of(data).config(data)
    model = data.get("model", data)
    return from_dict(ModelConfig, model, str(path))
