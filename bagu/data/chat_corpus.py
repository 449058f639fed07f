"""One source of a run as chats: chats of files, or pairs of docstring and function made from the standard library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bagu.data.chat_source import ChatJsonlSource
from bagu.data.corpus import Part, Selection, SourceConfig, TextCorpus, library_of_rows
from bagu.data.document import Document
from bagu.data.renamed import renamed_copies
from bagu.data.source import Conversation
from bagu.data.split import held_ids
from bagu.data.stdlib import DEFINED, Function, documented_functions, function_chat
from bagu.errors import BaguError


@dataclass(frozen=True)
class ChatCorpus:
    """A source of chats. `text` is the standard library that its pairs are made from; None where chats are read."""

    name: str
    config: SourceConfig
    selection: Selection
    text: TextCorpus | None

    @classmethod
    def of(cls, name: str, config: SourceConfig, selection: Selection) -> ChatCorpus:
        return cls(name, config, selection, library_of_rows(name, config, selection))

    @cached_property
    def source(self) -> ChatJsonlSource:
        return chat_source(self.config)

    @cached_property
    def facts(self) -> dict[str, Any]:
        if self.text is not None:
            return self.text.facts
        return {**self.source.describe(), **self.selection.facts}

    @cached_property
    def held_out(self) -> frozenset[str]:
        """The ids of the chats that are held out, by the rule that holds out documents."""
        ids = [chat.id for chat in self.source.conversations()]
        return held_ids(ids, fraction=self.selection.validation, seed=self.selection.seed)

    def conversations(self, part: Part) -> Iterator[Conversation]:
        """The chats of a part: pairs made from the modules of that part, or the chats of the files that are in it."""
        if self.text is not None:
            yield from map(function_chat, self._functions(self.text, part))
            return
        for chat in self.source.conversations():
            if (chat.id in self.held_out) == (part == "validation"):
                yield chat

    def _functions(self, text: TextCorpus, part: Part) -> Iterable[Function]:
        """The functions of the modules of a part; for training also copies, which have no name of a held-out module."""
        limit = {} if self.config.max_bytes is None else {"max_bytes": self.config.max_bytes}
        found = documented_functions(text.documents(part), **limit)
        if part == "validation" or not self.config.renamed:
            return found
        held_out = frozenset(name for d in text.documents("validation") for name in DEFINED.findall(d.text))
        return renamed_copies(found, self.config.renamed, taken=held_out, seed=self.selection.seed)

    def documents(self, part: Part) -> Iterator[Document]:
        """The messages of each chat, one after another, as a text."""
        for chat in self.conversations(part):
            yield Document(id=chat.id, text="\n".join(str(message["content"]) for message in chat.messages))

    def training_texts(self) -> Iterator[str]:
        return (document.text for document in self.documents("train"))

    def sharing(self, text: TextCorpus) -> ChatCorpus:
        """The same chats made from a corpus that is read already, if it selects the same documents."""
        own = self.text
        if own is None or (own.config.path, own.config.glob, own.selection) != (
            text.config.path,
            text.config.glob,
            text.selection,
        ):
            return self
        return ChatCorpus(self.name, self.config, self.selection, text)

    def without_text(self) -> ChatCorpus:
        return ChatCorpus.of(self.name, self.config, self.selection)


def chat_source(config: SourceConfig) -> ChatJsonlSource:
    """The chats that `config` names; an option that does not apply to them is refused."""
    if config.field is not None:
        raise BaguError("field is set, and chats have fields of their own", hint="leave it out")
    if config.max_bytes is not None:
        raise BaguError("max_bytes is set, and it bounds the pairs of the standard library", hint="leave it out")
    if config.renamed:
        raise BaguError("renamed is set, and it copies functions of the standard library", hint="leave it out")
    path = Path(config.path)
    return ChatJsonlSource(path) if config.glob is None else ChatJsonlSource(path, config.glob)
