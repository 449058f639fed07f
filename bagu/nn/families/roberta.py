"""RoBERTa with its masked-LM head: a BERT whose positions start at row pad_token_id + 1 of their table.

As in transformers, a token pad_token_id inside a text takes no position (`LearnedEncoding.skip_padding`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bagu.machine.hub import WeightsError
from bagu.nn.config import ModelConfig
from bagu.nn.families.bert import KEYS as BERT_KEYS
from bagu.nn.families.bert import encoder_rules, read_encoder, write_encoder
from bagu.nn.families.core import Family, Rule
from bagu.nn.families.keys import Key, Read
from bagu.nn.position_choices import Learned

KEYS: dict[str, Key] = {**BERT_KEYS, "pad_token_id": Read(int, 1, least=0)}


def read(hf: Mapping[str, Any]) -> ModelConfig:
    config, offset = read_encoder(hf), hf["pad_token_id"] + 1
    return replace(config, positions=Learned(offset=offset), max_len=config.max_len - offset)


def write(config: ModelConfig) -> dict[str, Any]:
    if not isinstance(config.positions, Learned) or not config.positions.offset:
        raise WeightsError("the model has no learned positions with an offset", hint="use the family bert")
    offset = config.positions.offset
    return write_encoder(config) | {"max_position_embeddings": config.max_len + offset, "pad_token_id": offset - 1}


ROBERTA = Family(
    name="roberta",
    architecture="RobertaForMaskedLM",
    headless="RobertaModel",
    keys=KEYS,
    read=read,
    write=write,
    rules=(
        *encoder_rules("roberta"),
        Rule("mlm.dense.*", "lm_head.dense.*"),
        Rule("mlm.norm.*", "lm_head.layer_norm.*"),
        Rule("head.weight", "lm_head.decoder.weight"),
        Rule("mlm.bias", "lm_head.bias", tied=True),
        Rule("mlm.bias", "lm_head.decoder.bias", tied=False),
    ),
    prefix="roberta.",
    unused=(r"roberta\.pooler\..*", r"roberta\.embeddings\.position_ids"),
    copies={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    spares={"lm_head.bias": "lm_head.decoder.bias"},
)
