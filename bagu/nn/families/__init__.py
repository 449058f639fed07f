"""The families of checkpoints that are known here: a family is data, the model is always `Transformer`."""

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

__all__ = ["FAMILIES", "Family", "can_say", "family_for", "family_named", "family_of"]

# a model is saved as the first of these that can say it, so the plainest comes first
FAMILIES: dict[str, Family] = {f.name: f for f in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK_V3, GPT2, BERT)}


def family_of(hf: Mapping[str, Any]) -> Family:
    """The family that a config.json names."""
    name = hf.get("model_type")
    if not isinstance(name, str):
        raise WeightsError("config.json has no model_type", hint=f"known here: {', '.join(FAMILIES)}")
    return family_named(name)


def family_named(name: str) -> Family:
    """The family of that model_type. The error lists the families and suggests none: a name with a similar spelling is
    another architecture (smollm3 is not llama)."""
    if name not in FAMILIES:
        raise UnknownName(f"there is no model family {name!r}", hint=f"known here: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_for(config: ModelConfig) -> Family:
    """The family that can say `config`: what it writes is read back as the same model."""
    for family in FAMILIES.values():
        if can_say(family, config):
            return family
    raise WeightsError(
        "no family of checkpoints known here has a model of this configuration",
        hint=f"keep it as a bagu checkpoint, or train a model one of these can say: {', '.join(FAMILIES)}",
    )


def can_say(family: Family, config: ModelConfig) -> bool:
    """Whether a config.json of this family can describe a model with the logits of `config`."""
    try:
        return _served(family.config(family.write(config))) == _served(config)
    except BaguError:  # an objection to what it would have to write is a no
        return False


def _served(config: ModelConfig) -> ModelConfig:
    """`config` without what only training reads, and with the windows of all layers: equal where the logits are."""
    moe = config.moe and replace(
        config.moe,
        aux_weight=None,
        bias_rate=None if config.moe.bias_rate is None else 0.001,
        dense_layers=tuple(sorted(set(config.moe.dense_layers))),
    )
    windows = tuple(config.window(i) for i in range(config.num_layers))
    return replace(config, dropout=0.0, init_std=0.02, moe=moe, windows=windows)
