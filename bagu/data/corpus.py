"""One source of a run as documents: read, deduplicated, split into training and validation.

Everything is read on first use: a corpus whose tokens are in the cache is hashed, and not parsed or tokenised again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from bagu.data.dedup import DedupReport, deduplicate
from bagu.data.document import LONG, AnyDocument, Shelf
from bagu.data.source import JsonlSource, ParquetSource, Source, open_source
from bagu.data.split import end_of_training, held_ids, place
from bagu.data.stdlib import StdlibSource
from bagu.errors import BaguError

STDLIB = "stdlib"  # the built-in corpus: Python's standard library
Part = Literal["train", "validation"]
DEDUP = 0.8
PARTS: tuple[Part, Part] = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Where data comes from: "stdlib", or a file or folder of text, JSON lines, .json lists or Parquet.

    Of a folder every text file is read, whatever its name; binary and hidden files are left out, and the run says so.
    UTF-16 and GB18030 are recognised. `field` is the JSON key or Parquet column that holds the text, `glob` selects
    files of a folder. Objectives that read chats take JSON or Parquet in the form of messages, ShareGPT, Alpaca or TRL;
    from "stdlib" they make pairs of a docstring and its function, with answers of at most `max_bytes`. Each function of
    the training files comes again in `renamed` copies under random names, from which a small model learns to copy the
    asked name (renamed.py).
    """

    path: str = STDLIB
    field: str | None = None
    glob: str | None = None
    max_bytes: int | None = None
    renamed: int = 0


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which documents are used: near-duplicates above the similarity `dedup` are removed (null keeps all), and the
    share `validation` is held out. `seed` draws both. Chats, preferences and prompts of files are not compared."""

    dedup: float | Literal["auto"] | None  # auto: DEDUP for text
    validation: float
    seed: int

    @property
    def threshold(self) -> float | None:
        """The similarity above which a document of text is removed."""
        return DEDUP if self.dedup == "auto" else self.dedup

    @property
    def facts(self) -> dict[str, Any]:
        """What is recorded of a source."""
        return {"validation": self.validation, "seed": self.seed}


class Corpus(Protocol):
    """What a run needs of each source, whatever its objective makes of it."""

    @property
    def name(self) -> str: ...

    @property
    def facts(self) -> dict[str, Any]:
        """What determines the documents, as JSON: hash, files and bytes of the source, and how they are selected."""
        ...

    def training_texts(self) -> Iterator[str]:
        """The text of the training part, for a search of what a model has seen."""
        ...

    def without_text(self) -> Self:
        """The same corpus with nothing read yet, which frees the memory that its text took."""
        ...


@dataclass(frozen=True)
class TextCorpus:
    """A source of text."""

    name: str
    config: SourceConfig
    selection: Selection

    @cached_property
    def source(self) -> Source:
        return text_source(self.config)

    @cached_property
    def facts(self) -> dict[str, Any]:
        field = {} if self.config.field is None else {"field": self.config.field}
        return {**self.source.describe(), "dedup": self.selection.threshold, **self.selection.facts, **field}

    @cached_property
    def _shelf(self) -> Shelf:
        shelf = Shelf()
        for document in self.source.documents():
            shelf.append(document)
        return shelf

    @cached_property
    def _kept(self) -> tuple[Sequence[int], DedupReport | None]:
        threshold = self.selection.threshold
        if threshold is None:
            return range(len(self._shelf)), None
        return deduplicate(self._shelf, threshold=threshold, seed=self.selection.seed)

    @property
    def dedup(self) -> DedupReport | None:
        return self._kept[1]

    @cached_property
    def _split(self) -> dict[Part, list[int] | list[AnyDocument]]:
        """The numbers of the documents on the shelf, or the two parts of the only one. Validation documents are
        shuffled, so that the first few are a fair sample of all."""
        shelf, (kept, _), seed, fraction = self._shelf, self._kept, self.selection.seed, self.selection.validation
        if len(kept) == 1 and 0 < fraction < 1:
            only, at = shelf[kept[0]], end_of_training(shelf[kept[0]], fraction)
            return {"train": [only.between(0, at, only.id)], "validation": [only.between(at, None, f"{only.id}:end")]}
        held = held_ids([shelf.ids[number] for number in kept], fraction=fraction, seed=seed)
        validation = sorted(
            (n for n in kept if shelf.ids[n] in held), key=lambda n: place(shelf.ids[n], seed=seed, purpose="order")
        )
        return {"train": [n for n in kept if shelf.ids[n] not in held], "validation": validation}

    def documents(self, part: Part) -> Iterator[AnyDocument]:
        """The documents of a part. A generator function: nothing is read before the first document is asked for."""
        for entry in self._split[part]:
            yield self._shelf[entry] if isinstance(entry, int) else entry

    def training_texts(self) -> Iterator[str]:
        return (text for document in self.documents("train") for text in document.pieces(LONG))

    def without_text(self) -> TextCorpus:
        return TextCorpus(self.name, self.config, self.selection)


def library_of_rows(name: str, config: SourceConfig, selection: Selection) -> TextCorpus | None:
    """The standard library, if chats, preferences or prompts are made from it; None if they are read from files."""
    if config.path == STDLIB:
        return TextCorpus(name, config, selection)
    if selection.dedup not in ("auto", None):
        raise BaguError(
            f"dedup is {selection.dedup}, and source {name!r} is not text: its rows are not compared",
            hint="set dedup=auto, and remove copies from the file if it has any",
        )
    return None


def text_source(config: SourceConfig) -> Source:
    """The source of text that `config` names; an option that does not apply to it is refused."""
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
