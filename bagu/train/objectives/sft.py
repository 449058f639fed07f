"""Supervised fine-tuning: predict the assistant's tokens of a chat, starting from a pretrained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bagu.data.chat import ChatEncoder
from bagu.data.chat_corpus import ChatCorpus
from bagu.data.corpus import PARTS, Part, Selection, SourceConfig
from bagu.data.loader import DataConfig
from bagu.data.renamed import RENAMING
from bagu.data.store import TokenStore
from bagu.data.store_writer import on_disk
from bagu.data.tokenizer import BpeTokenizer
from bagu.machine.cache import cache_folder
from bagu.nn.config import ModelConfig
from bagu.runs.display import Display
from bagu.train.objective import RunSettings, TrainingData, check_causal, check_pretrained
from bagu.train.objectives.language_modelling import NEXT_TOKEN_DISPLAY
from bagu.train.objectives.token_objective import TokenObjective, token_data
from bagu.types import Batch


@dataclass(frozen=True, kw_only=True)
class SupervisedFineTuning(TokenObjective):
    """The assistant's tokens of a chat are the targets."""

    kind: Literal["sft"] = "sft"

    def check_run(self, run: RunSettings) -> None:
        check_pretrained(self.kind, run)

    def check_model(self, model: ModelConfig) -> None:
        check_causal(self.kind, model)

    def corpus(self, name: str, config: SourceConfig, selection: Selection) -> ChatCorpus:
        return ChatCorpus.of(name, config, selection)

    def read(
        self, corpora: Mapping[str, ChatCorpus], tokenizer: BpeTokenizer, data: DataConfig, model: ModelConfig
    ) -> TrainingData[Batch]:
        encoder = ChatEncoder(tokenizer)
        stores = {name: {part: _store(corpus, part, encoder) for part in PARTS} for name, corpus in corpora.items()}
        return token_data(corpora, stores, data, model.vocab_size)

    def display(self) -> Display:
        return NEXT_TOKEN_DISPLAY


def _store(corpus: ChatCorpus, part: Part, encoder: ChatEncoder) -> TokenStore:
    """The tokens of the chats of a part and which of them are targets, from the cache if they are there."""
    source: dict[str, Any] = {**corpus.facts, "part": part, "chats": corpus.config.max_bytes}
    if corpus.config.renamed and part == "train":
        source["renamed"] = [corpus.config.renamed, RENAMING]
    return on_disk(
        encoder.documents(corpus.conversations(part)),
        cache_folder() / "tokens",
        token_bytes=encoder.tokenizer.token_bytes,
        facts={"source": source, **encoder.token_facts},
    )
