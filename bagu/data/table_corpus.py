"""The common part of sources whose rows are not text: preferences and prompts. They are rows of a table, or made from
functions of the standard library."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from bagu.data.corpus import Selection, SourceConfig, TextCorpus, library_of_rows
from bagu.data.table import TableSource
from bagu.errors import BaguError


@dataclass(frozen=True)
class TableCorpus:
    """A source. `library` is the standard library that its rows are made from; None for a table."""

    name: str
    config: SourceConfig
    selection: Selection
    library: TextCorpus | None

    @classmethod
    def of(cls, name: str, config: SourceConfig, selection: Selection) -> Self:
        if config.renamed:
            raise BaguError("renamed is set, and only chats have renamed copies", hint="leave it out")
        return cls(name, config, selection, library_of_rows(name, config, selection))

    @cached_property
    def source(self) -> TableSource:
        if self.config.max_bytes is not None:
            raise BaguError("max_bytes is set, and it bounds functions of the standard library", hint="leave it out")
        return TableSource(Path(self.config.path), self.config.glob)

    @cached_property
    def facts(self) -> dict[str, Any]:
        if self.library is not None:
            return self.library.facts
        return {**self.source.describe(), **self.selection.facts}

    @property
    def function_limit(self) -> dict[str, int]:
        """The size limit as an argument of `documented_functions`."""
        return {} if self.config.max_bytes is None else {"max_bytes": self.config.max_bytes}

    def sharing(self, text: TextCorpus) -> Self:
        """The same rows made from a corpus that is read already, if it selects the same documents."""
        own = self.library
        if own is None or (own.config.path, own.selection) != (text.config.path, text.selection):
            return self
        return replace(self, library=text)

    def without_text(self) -> Self:
        return self.of(self.name, self.config, self.selection)
