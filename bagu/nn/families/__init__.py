"""The supported checkpoint families. A family is data; the model is always `Transformer`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bagu.errors import BaguError, UnknownName
from bagu.machine.hub import WeightsError
from bagu.nn.config import ModelConfig
from bagu.nn.families.bert import BERT
from bagu.nn.families.core import Family
from bagu.nn.families.deepseek_v3 import DEEPSEEK_V3
from bagu.nn.families.gemma3 import GEMMA3
from bagu.nn.families.gpt2 import GPT2
from bagu.nn.families.gpt_oss import GPT_OSS
from bagu.nn.families.granite import GRANITE
from bagu.nn.families.llama import LLAMA, MISTRAL
from bagu.nn.families.mixtral import MIXTRAL
from bagu.nn.families.olmo2 import OLMO2
from bagu.nn.families.phi3 import PHI3
from bagu.nn.families.qwen import QWEN2
from bagu.nn.families.qwen3 import QWEN3, QWEN3_MOE
from bagu.nn.families.roberta import ROBERTA
from bagu.nn.families.smollm3 import SMOLLM3

__all__ = ["FAMILIES", "Family", "can_describe", "family_for", "family_named", "family_of"]

# a model is saved as the first of these that can describe it, so the simplest comes first
FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, PHI3, SMOLLM3, GRANITE, OLMO2, GEMMA3, GPT_OSS, DEEPSEEK_V3,
        GPT2, BERT, ROBERTA,
    )
}  # fmt: skip
# model types that contain one of these families and a part that bagu does not have
MULTIMODAL = {"gemma3": "gemma3_text", "gemma3n": "gemma3_text", "phi4_multimodal": "phi3", "phi3_v": "phi3"}


def family_of(hf: Mapping[str, Any]) -> Family:
    """The family of a config.json."""
    name = hf.get("model_type")
    if not isinstance(name, str):
        raise WeightsError("config.json has no model_type", hint=f"supported: {', '.join(FAMILIES)}")
    return family_named(name)


def family_named(name: str) -> Family:
    """The family of a model_type. The error lists the families and suggests none: a similar name is another
    architecture (smollm3 is not llama)."""
    if name in MULTIMODAL:
        raise UnknownName(
            f"{name} has a vision tower, which bagu does not support",
            hint=f"give a checkpoint of its text model only, of model_type {MULTIMODAL[name]}",
        )
    if name not in FAMILIES:
        raise UnknownName(f"there is no model family {name!r}", hint=f"supported: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_for(config: ModelConfig, name: str | None = None) -> Family:
    """The family that can describe `config`: reading its config.json gives the same model. That is the family `name`,
    which the model came from, if it can, and else the first: a Phi-3 is a Llama too, with other names."""
    own = [FAMILIES[name]] if name is not None else []
    for family in (*own, *FAMILIES.values()):
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
    """`config` without training options and unused sizes, and with one window per layer: equal configs give equal
    logits."""
    moe = config.moe and replace(
        config.moe,
        aux_weight=None,
        bias_rate=None if config.moe.bias_rate is None else 0.001,
        dense_layers=tuple(sorted(set(config.moe.dense_layers))),
    )
    windows = tuple(config.window(i) for i in range(config.num_layers))
    all_experts = moe is not None and not moe.dense_layers
    size = moe.expert_size if moe is not None and all_experts else config.intermediate_size  # no layer would use it
    return replace(config, dropout=0.0, init_std=0.02, moe=moe, windows=windows, intermediate_size=size)
