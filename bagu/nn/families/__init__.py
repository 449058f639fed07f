"""The supported checkpoint families. A family is data; the model is always `Transformer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bagu.errors import BaguError, UnknownName
from bagu.nn.config import ModelConfig
from bagu.nn.families.bert import BERT
from bagu.nn.families.core import Family
from bagu.nn.families.deepseek_v3 import DEEPSEEK_V3
from bagu.nn.families.gpt2 import GPT2
from bagu.nn.families.llama import LLAMA, MISTRAL
from bagu.nn.families.qwen import QWEN2
from bagu.nn.families.qwen3 import QWEN3, QWEN3_MOE
from bagu.nn.hub import WeightsError

__all__ = ["FAMILIES", "Family", "can_describe", "family_for", "family_named", "family_of"]

# a model is saved as the first of these that can describe it, so the simplest comes first
FAMILIES: dict[str, Family] = {f.name: f for f in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK_V3, GPT2, BERT)}


def family_of(hf: Mapping[str, Any]) -> Family:
    """The family of a config.json."""
    name = hf.get("model_type")
    if not isinstance(name, str):
        raise WeightsError("config.json has no model_type", hint=f"supported: {', '.join(FAMILIES)}")
    return family_named(name)


def family_named(name: str) -> Family:
    """The family of a model_type. The error lists the families and suggests none: a similar name is another
    architecture (smollm3 is not llama)."""
    if name not in FAMILIES:
        raise UnknownName(f"there is no model family {name!r}", hint=f"supported: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_for(config: ModelConfig) -> Family:
    """The family that can describe `config`: reading its config.json gives the same model."""
    for family in FAMILIES.values():
        if can_describe(family, config):
            return family
    raise WeightsError(
        "no supported checkpoint family can describe a model of this configuration",
        hint=f"keep it as a bagu checkpoint, or train a model of one of these families: {', '.join(FAMILIES)}",
    )


def can_describe(family: Family, config: ModelConfig) -> bool:
    """Whether a config.json of this family can describe a model with the logits of `config`."""
    try:
        return _for_inference(family.config(family.file(config))) == _for_inference(config)
    except BaguError:  # the family cannot write this config
        return False


def _for_inference(config: ModelConfig) -> ModelConfig:
    """`config` without training options, and with one window per layer: equal configs give equal logits."""
    moe = config.moe and replace(
        config.moe,
        aux_weight=None,
        bias_rate=None if config.moe.bias_rate is None else 0.001,
        dense_layers=tuple(sorted(set(config.moe.dense_layers))),
    )
    windows = tuple(config.window(i) for i in range(config.num_layers))
    return replace(config, dropout=0.0, init_std=0.02, moe=moe, windows=windows)
