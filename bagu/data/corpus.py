"""From a run's sources to what its loader reads: text, split, tokenizer, token stores.

Nothing is read before it is asked for: a corpus whose tokens are in the cache is hashed, and not tokenised again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bagu.data import chat_template, store
from bagu.data.chat import ChatEncoder
from bagu.data.chat_source import ChatJsonlSource
from bagu.data.dedup import DedupReport, deduplicate
from bagu.data.loader import Loader, check_vocab
from bagu.data.source import (
    Conversation,
    Document,
    JsonlSource,
    ParquetSource,
    Source,
    open_source,
)
from bagu.data.split import Split, held_ids, hold_out, place, sample
from bagu.data.stdlib import StdlibSource, sft_pairs
from bagu.data.store import TokenStore
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError
from bagu.machine.cache import cache_folder
from bagu.recipes.run import STDLIB, Run, SourceConfig, TokenizerConfig

__all__ = ["Corpus", "Tokens", "conversations", "texts", "tokens_of", "train_tokenizer"]

MB = 1_000_000


def text_source(config: SourceConfig) -> Source:
    """The source a config names; an option it has no use for is refused."""
    if config.path == STDLIB:
        if config.field is not None or config.glob is not None:
            raise BaguError("field or glob is set, and the standard library has neither", hint="leave them out")
        return StdlibSource()
    source = open_source(Path(config.path), config.glob)
    if config.field is None:
        return source
    if isinstance(source, JsonlSource):
        return replace(source, field=config.field)
    if isinstance(source, ParquetSource):
        return replace(source, column=config.field)
    raise BaguError(f"field is set, and {config.path} is plain text", hint="leave it out")


def chat_source(config: SourceConfig) -> ChatJsonlSource:
    """The chats a config names; an option they have no use for is refused."""
    if config.field is not None:
        raise BaguError("field is set, and chats have fields of their own", hint="leave it out")
    if config.max_bytes is not None:
        raise BaguError("max_bytes is set, and it bounds the pairs of the standard library", hint="leave it out")
    path = Path(config.path)
    if path.match("*.parquet"):
        raise BaguError(f"chats are read from JSON, and {path} is Parquet", hint="write it as JSON lines")
    return ChatJsonlSource(path) if config.glob is None else ChatJsonlSource(path, config.glob)


@dataclass(frozen=True)
class Corpus:
    """One source of a run: its text without near-duplicates, and what is held out of it."""

    name: str
    config: SourceConfig
    run: Run

    @cached_property
    def source(self) -> Source:
        return text_source(self.config)

    @cached_property
    def chats(self) -> ChatJsonlSource | None:
        """What SFT reads in place of text; None where text is read, and the pairs of the library are made from it."""
        reads_text = self.run.stage == "pretrain" or self.config.path == STDLIB
        return None if reads_text else chat_source(self.config)

    @cached_property
    def held_chats(self) -> frozenset[str]:
        """The ids of the chats that are held out, by the rule that holds out documents."""
        assert self.chats is not None, "only chats are held out by this"
        ids = [chat.id for chat in self.chats.conversations()]
        return held_ids(ids, fraction=self.run.validation, seed=self.run.data.seed)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What decides the documents: the corpus hash, and how they were chosen."""
        how = {"dedup": self.run.dedup, "validation": self.run.validation, "seed": self.run.data.seed}
        field = {} if self.config.field is None else {"field": self.config.field}
        return {**(self.chats or self.source).describe(), **how, **field}

    @cached_property
    def _read(self) -> tuple[list[Document], DedupReport | None]:
        documents = list(self.source.documents())
        if self.run.dedup is None:
            return documents, None
        return deduplicate(documents, threshold=self.run.dedup, seed=self.run.data.seed)

    def for_run(self, run: Run) -> Corpus:
        """The same source in another run; text that was read and split the same way there is not read again."""
        other = Corpus(self.name, run.sources[self.name], run)
        ways = [(c.config.path, c.config.glob, c.run.dedup, c.run.validation, c.run.data.seed) for c in (self, other)]
        if ways[0] == ways[1]:
            other.__dict__.update({k: v for k, v in self.__dict__.items() if k in ("source", "_read", "split")})
        return other

    def without_text(self) -> Corpus:
        """The same source with nothing read: what it held in memory is free, and is read again if it is asked for."""
        return Corpus(self.name, self.config, self.run)

    @property
    def dedup(self) -> DedupReport | None:
        return self._read[1]

    @cached_property
    def split(self) -> Split:
        """Held-out documents come in an order of their own, so that the first few are a fair sample of all."""
        seed = self.run.data.seed
        split = hold_out(self._read[0], fraction=self.run.validation, seed=seed)
        held = sorted(split.validation, key=lambda d: place(d.id, seed=seed, purpose="order"))
        return Split(train=split.train, validation=held)


def train_tokenizer(corpora: Mapping[str, Corpus], config: TokenizerConfig) -> BpeTokenizer:
    """A byte-level BPE with bagu's chat template, from the training text alone."""
    documents = [d for corpus in corpora.values() for d in corpus.split.train]
    total = sum(len(d.text.encode()) for d in documents)
    texts = sample(documents, max_bytes=round(config.max_mb * MB), total_bytes=total)
    return BpeTokenizer.train(texts, vocab_size=config.vocab_size or 4096, chat_template=chat_template.DEFAULT_TEMPLATE)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What a run trains on and is measured on."""

    loader: Loader
    validation: dict[str, TokenStore]
    facts: dict[str, Any]  # by source: hash, files, documents, duplicates


def tokens_of(run: Run, corpora: Mapping[str, Corpus], tokenizer: BpeTokenizer, vocab_size: int) -> Tokens:
    """The stores of each source, from the cache where they are there."""
    train, held, facts = {}, {}, {}
    for name, corpus in corpora.items():
        train[name], held[name] = (_store(corpus, part, tokenizer) for part in ("train", "validation"))
        check_vocab(train[name], vocab_size)
        facts[name] = {
            **corpus.facts, "train_documents": train[name].num_documents, "train_tokens": train[name].num_tokens,
            "validation_documents": held[name].num_documents, "validation_tokens": held[name].num_tokens,
        }  # fmt: skip
    return Tokens(loader=Loader(train, run.data), validation=held, facts=facts)


def _store(corpus: Corpus, part: str, tokenizer: BpeTokenizer) -> TokenStore:
    cache, facts = cache_folder() / "tokens", {**corpus.facts, "part": part}
    if corpus.run.stage == "pretrain":
        return store.build(texts(corpus, part), tokenizer, cache, source=facts)
    encoder = ChatEncoder(tokenizer)
    facts |= {"chats": corpus.config.max_bytes, "template": encoder.template.source}
    return store.on_disk(
        encoder.documents(conversations(corpus, part)), cache, token_bytes=tokenizer.token_bytes,
        facts={"source": facts, "tokenizer": tokenizer.fingerprint},
    )  # fmt: skip


def texts(corpus: Corpus, part: str) -> Iterator[Document]:
    """The documents of a part. A generator function: the corpus is read when the first is asked for, not before."""
    yield from getattr(corpus.split, part)


def conversations(corpus: Corpus, part: str) -> Iterator[Conversation]:
    """The chats of a source: pairs made from the modules of that part, or those of its files that are in it."""
    if corpus.chats is None:
        more = {} if corpus.config.max_bytes is None else {"max_bytes": corpus.config.max_bytes}
        yield from sft_pairs(getattr(corpus.split, part), **more)
        return
    for chat in corpus.chats.conversations():
        if (chat.id in corpus.held_chats) == (part == "validation"):
            yield chat
