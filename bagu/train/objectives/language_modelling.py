"""Pretraining: predict each next token of a text. Continued pretraining is the same objective with `init_from`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bagu.data import BpeTokenizer, DataConfig, TokenStore, build
from bagu.data.corpus import PARTS, Selection, SourceConfig, TextCorpus
from bagu.machine.cache import cache_folder
from bagu.nn.config import ModelConfig
from bagu.runs.display import Curve, Display, Headline
from bagu.train.objective import TrainingData, check_causal
from bagu.train.objectives.token_objective import TokenObjective, token_data
from bagu.types import Batch

NEXT_TOKEN_DISPLAY = Display(
    curves=(
        Curve(title="Loss", unit="nats per token", metrics={"loss_nats": "training", "val_loss_nats": "validation"}),
        Curve(
            title="Bits per byte",
            unit="bits per byte",
            references=True,
            metrics={"bits_per_byte": "training", "val_bits_per_byte": "validation"},
        ),
    ),
    headlines=(
        Headline(metric="val_bits_per_byte", name="Validation", unit="bits/byte"),
        Headline(metric="val_loss_nats", name="Validation loss", unit="nats"),
        Headline(metric="loss_nats", name="Training loss", unit="nats"),
    ),
    progress={
        "loss_nats": "loss {:.3f} nats",
        "bits_per_byte": "{:.3f} bits/byte",
        "val_bits_per_byte": "validation {:.3f} bits/byte",
    },
)


@dataclass(frozen=True, kw_only=True)
class LanguageModelling(TokenObjective):
    """Every token of a text is a target."""

    kind: Literal["pretrain"] = "pretrain"

    def check_model(self, model: ModelConfig) -> None:
        check_causal(self.kind, model)

    def corpus(self, name: str, config: SourceConfig, selection: Selection) -> TextCorpus:
        return TextCorpus(name, config, selection)

    def read(
        self, corpora: Mapping[str, TextCorpus], tokenizer: BpeTokenizer, data: DataConfig, model: ModelConfig
    ) -> TrainingData[Batch]:
        return token_data(corpora, text_stores(corpora, tokenizer), data, model.vocab_size)

    def display(self) -> Display:
        return NEXT_TOKEN_DISPLAY


def text_stores(
    corpora: Mapping[str, TextCorpus], tokenizer: BpeTokenizer
) -> dict[str, dict[Literal["train", "validation"], TokenStore]]:
    """The tokens of each text, from the cache if they are there."""
    cache = cache_folder() / "tokens"
    return {
        name: {
            part: build(corpus.documents(part), tokenizer, cache, source={**corpus.facts, "part": part})
            for part in PARTS
        }
        for name, corpus in corpora.items()
    }
