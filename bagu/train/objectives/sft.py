"""Supervised fine-tuning: predict the assistant's tokens of a chat, starting from a pretrained model, or from new
weights where the chats alone teach their language.

Chats are tokenized whole. If some are longer than the context, a second store has them cut at turns
(bagu/data/chat_cut.py). What the plan, data.json and the report say about long chats is the difference of the two.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from bagu.data import BpeTokenizer, ChatCorpus, ChatEncoder, DataConfig, TokenStore, on_disk
from bagu.data.corpus import PARTS, Part, Selection, SourceConfig
from bagu.data.renamed import RENAMING
from bagu.errors import BaguError
from bagu.machine.cache import cache_folder
from bagu.nn.config import ModelConfig
from bagu.runs.display import Display, Table
from bagu.train.objective import RunSettings, TrainingData, check_causal, check_pretrained
from bagu.train.objectives.language_modelling import NEXT_TOKEN_DISPLAY
from bagu.train.objectives.token_objective import TokenObjective, token_data
from bagu.types import Batch

LONGEST = 4096  # the longest context that `fit_context` chooses: one row has then the tokens of the recipe's 16 of 256
GRAIN = 64  # contexts that it chooses are multiples of this
COUNTS = ("chats_cut", "chats_left_out", "answer_tokens_left_out")  # in data.json


@dataclass(frozen=True, kw_only=True)
class SupervisedFineTuning(TokenObjective):
    """The assistant's tokens of a chat are the targets. `new_weights` says that the run may start without a model."""

    kind: Literal["sft"] = "sft"
    new_weights: bool = False

    def check_run(self, run: RunSettings) -> None:
        if not self.new_weights:
            check_pretrained(self.kind, run)

    def check_model(self, model: ModelConfig) -> None:
        check_causal(self.kind, model)

    def corpus(self, name: str, config: SourceConfig, selection: Selection) -> ChatCorpus:
        return ChatCorpus.of(name, config, selection)

    def read(
        self, corpora: Mapping[str, ChatCorpus], tokenizer: BpeTokenizer, data: DataConfig, model: ModelConfig
    ) -> TrainingData[Batch]:
        whole = _stores(corpora, tokenizer)
        encoder, stores = ChatEncoder(tokenizer), dict[str, dict[Part, TokenStore]]()
        for name, corpus in corpora.items():
            stores[name] = {p: _fitting(whole[name][p], corpus, p, encoder, data.context) for p in PARTS}
        found = token_data(corpora, stores, data, model.vocab_size)
        counts = {name: _counts(whole[name], stores[name], data.context) for name in stores}
        notes = {
            name: f"longest chat {_longest(whole[name])} tokens, context {data.context}"
            + (f": {cut} cut at turns, {left} left out, {lost} answer tokens with them" if cut or left else "")
            for name, (cut, left, lost) in counts.items()
        }
        return replace(
            found,
            sources={name: replace(size, note=notes[name]) for name, size in found.sources.items()},
            facts={name: {**f, **dict(zip(COUNTS, counts[name], strict=True))} for name, f in found.facts.items()},
        )

    def fit_context(
        self, corpora: Mapping[str, ChatCorpus], tokenizer: BpeTokenizer, data: DataConfig, model: ModelConfig
    ) -> DataConfig:
        """The context of the longest chat, at least that of `data`, at most LONGEST and the positions of the model. The
        rows become fewer as they become longer: a micro-batch keeps its tokens, and so its memory."""
        longest = max(map(_longest, _stores(corpora, tokenizer).values()))
        wanted = max(data.context, min(-(-longest // GRAIN) * GRAIN, LONGEST))
        context = min(wanted, model.max_len)
        return replace(data, context=context, rows=max(1, data.rows * data.context // context))

    def tables(self, data: TrainingData[Batch], eval_batches: int) -> Sequence[Table]:
        rows = [[name, *(facts[key] for key in COUNTS)] for name, facts in data.facts.items()]
        if not any(count for _, *counts in rows for count in counts):
            return ()
        columns = ("source", "cut at turns", "left out", "answer tokens left out")
        note = "A chat longer than the context is cut at turns; a turn that does not fit by itself is left out."
        return (Table(title="Long chats", columns=columns, rows=rows, note=note),)

    def display(self) -> Display:
        return NEXT_TOKEN_DISPLAY


def _stores(corpora: Mapping[str, ChatCorpus], tokenizer: BpeTokenizer) -> dict[str, dict[Part, TokenStore]]:
    """The whole chats of each source and part."""
    encoder = ChatEncoder(tokenizer)
    return {name: {part: _store(corpus, part, encoder) for part in PARTS} for name, corpus in corpora.items()}


def _longest(stores: Mapping[Part, TokenStore]) -> int:
    return max(int(store.lengths.max()) for store in stores.values())


def _fitting(whole: TokenStore, corpus: ChatCorpus, part: Part, encoder: ChatEncoder, context: int) -> TokenStore:
    """The chats of a part, those longer than `context` cut at turns."""
    if int(whole.lengths.max()) <= context:
        return whole
    first = next(encoder.documents(corpus.conversations(part), context), None)
    if first is None:
        raise BaguError(
            f"no turn of the {part} chats of source {corpus.name!r} fits in data.context = {context} tokens",
            hint="raise data.context, up to the model's positions, or give shorter chats",
        )
    return _store(corpus, part, encoder, context)


def _counts(whole: Mapping[Part, TokenStore], cut: Mapping[Part, TokenStore], context: int) -> tuple[int, int, int]:
    """Chats that are cut and that are left out, and the answer tokens that are not trained or evaluated for it."""
    divided = left_out = tokens = 0
    for part in PARTS:
        if cut[part] is not whole[part]:
            long = {_chat(whole[part], int(i)) for i in np.flatnonzero(whole[part].lengths > context)}
            kept = long & {_chat(cut[part], i) for i in range(cut[part].num_documents)}
            divided += len(kept)
            left_out += len(long) - len(kept)
            tokens += max(_targets(whole[part]) - _targets(cut[part]), 0)
    return divided, left_out, tokens


def _chat(store: TokenStore, document: int) -> str:
    """The id of the chat that a document is a part of."""
    return re.sub(r"#\d+$", "", store.document_id(document))


def _targets(store: TokenStore) -> int:
    assert store.loss_mask is not None, "chats have a mask"
    return int(store.loss_mask.sum(dtype=np.int64))


def _store(corpus: ChatCorpus, part: Part, encoder: ChatEncoder, context: int | None = None) -> TokenStore:
    """The tokens of the chats of a part and which of them are targets, from the cache if they are there; with
    `context`, longer chats cut at turns."""
    source: dict[str, Any] = {**corpus.facts, "part": part, "chats": corpus.config.max_bytes}
    if corpus.config.renamed and part == "train":
        source["renamed"] = [corpus.config.renamed, RENAMING]
    if context is not None:
        source["context"] = context
    return on_disk(
        encoder.documents(corpus.conversations(part), context),
        cache_folder() / "tokens",
        token_bytes=encoder.tokenizer.token_bytes,
        facts={"source": source, **encoder.token_facts},
    )
