"""The common part of objectives over preferences: their corpora, tokens and batches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from bagu.config import ConfigError
from bagu.data import BpeTokenizer, DataConfig, check_vocab
from bagu.data.corpus import PARTS, Selection, SourceConfig
from bagu.data.preference_batch import PreferenceBatch
from bagu.data.preference_loader import PreferenceLoader, evaluation_batches
from bagu.data.preference_set import PreferenceSet
from bagu.data.preferences import PreferenceCorpus, PreferenceEncoder, preference_store
from bagu.data.table_corpus import TableCorpus
from bagu.machine.cache import cache_folder
from bagu.nn.config import ModelConfig
from bagu.train.loss import Totals
from bagu.train.objective import Objective, RunSettings, SourceSize, TrainingData, check_pretrained


@dataclass(frozen=True, kw_only=True)
class PreferenceTotals(Totals):
    """`units` are pairs, or for KTO single answers; `chosen` and `rejected` count the answers of each kind."""

    units: int
    chosen: int
    rejected: int

    @classmethod
    def of(cls, batches: Sequence[PreferenceBatch], *, paired: bool) -> Self:
        answers, chosen = sum(b.num_sequences for b in batches), sum(b.num_chosen for b in batches)
        return cls(
            tokens=sum(b.num_tokens for b in batches),
            padding=sum(b.num_padding for b in batches),
            units=answers // 2 if paired else answers,
            chosen=chosen,
            rejected=answers - chosen,
        )


@dataclass(frozen=True, kw_only=True)
class PreferenceData(TrainingData[PreferenceBatch]):
    """The data of a run, with the sets that its batches come from."""

    train: Mapping[str, PreferenceSet]
    held: Mapping[str, PreferenceSet]
    config: DataConfig


@dataclass(frozen=True, kw_only=True)
class PreferenceObjective(Objective[PreferenceBatch]):
    """Learns from pairs of answers. With `text` strings are plain text: the answer follows the prompt directly and ends
    with the end-of-text token. Otherwise the chat template is applied, and a string is one message.
    """

    text: bool = False

    @property
    def paired(self) -> bool:
        """Whether a unit of the loss is a pair; otherwise it is one answer."""
        return True

    def check_run(self, run: RunSettings) -> None:
        check_pretrained(self.kind, run)

    def check_tokenizer(self, tokenizer: BpeTokenizer) -> None:
        if not self.text:
            PreferenceEncoder(tokenizer)  # raises for a tokenizer without a chat template

    def corpus(self, name: str, config: SourceConfig, selection: Selection) -> PreferenceCorpus:
        return PreferenceCorpus.of(name, config, selection)

    def data_shape(self, data: DataConfig) -> dict[str, Any]:
        return super().data_shape(data) | {"data.rows": data.rows}  # pairs are packed into micro-batches

    def read(
        self, corpora: Mapping[str, PreferenceCorpus], tokenizer: BpeTokenizer, data: DataConfig, model: ModelConfig
    ) -> PreferenceData:
        if data.packing == "joined":
            raise ConfigError(
                f"data.packing is 'joined', and objective {self.kind!r} scores each answer on its own",
                hint="leave data.packing out",
            )
        encoder, cache = PreferenceEncoder(tokenizer, text=self.text), cache_folder() / "tokens"
        train, held = (
            {
                name: PreferenceSet.of(name, preference_store(c, part, encoder, cache), data, paired=self.paired)
                for name, c in corpora.items()
            }
            for part in PARTS
        )
        for found in train.values():
            check_vocab(found.store, model.vocab_size)
        return preference_data(train, held, corpora, data, mismatched=not self.paired)


def preference_data(
    train: Mapping[str, PreferenceSet],
    held: Mapping[str, PreferenceSet],
    corpora: Mapping[str, TableCorpus],
    data: DataConfig,
    *,
    mismatched: bool,
) -> PreferenceData:
    """Batches of the sets."""

    def held_out(limit: int | None) -> Iterator[PreferenceBatch]:
        for found in held.values():
            yield from evaluation_batches(found, data, limit=limit, mismatched=mismatched)

    return PreferenceData(
        loader=PreferenceLoader(train, data, mismatched=mismatched),
        held_out=held_out,
        sources={
            name: SourceSize(
                documents=len(found.units),
                tokens=int(found.lengths.sum()),
                targets=found.num_targets,
                validation_tokens=int(held[name].lengths.sum()),
            )
            for name, found in train.items()
        },
        facts={
            name: {
                **corpus.facts,
                "train_documents": len(train[name].units),
                "train_tokens": int(train[name].lengths.sum()),
                "train_left_out": train[name].left_out,
                "validation_documents": len(held[name].units),
                "validation_tokens": int(held[name].lengths.sum()),
                "validation_left_out": held[name].left_out,
            }
            for name, corpus in corpora.items()
        },
        train=train,
        held=held,
        config=data,
    )


def right_share(margin: torch.Tensor) -> torch.Tensor:
    """1 for a pair that is ranked as labelled, 0 for the opposite, 1/2 for a tie."""
    return (margin.sign() + 1) / 2
