"""Tokenized documents, concatenated: built once (store_writer.py), stored on disk, memory-mapped when read.

tokens         [N] uint16 or uint32     all documents, each with the end token of its tokenizer or chat template
offsets        [D + 1] int64            document i is tokens[offsets[i] : offsets[i + 1]]
mask           [N] uint8, or absent     1 for a token that is a target (in chats: the assistant's)
names          [B] uint8                the ids of the documents in UTF-8, with
name_offsets   [D + 1] int64            their offsets
token_bytes    [V] int32                bytes of text of each token id; 0 for control tokens
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from bagu.errors import BaguError

FACTS = "facts.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDocument:
    """One tokenized document. `mask` is 1 for a token that is a target; None if all are. If not `ends`, it is a piece
    that the next one continues."""

    id: str
    tokens: Sequence[int] | np.ndarray
    mask: Sequence[int] | np.ndarray | None = None
    ends: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStore:
    """Read-only. The arrays may be memory maps, and slices of them are views."""

    flat: np.ndarray
    offsets: np.ndarray
    loss_mask: np.ndarray | None
    names: np.ndarray
    name_offsets: np.ndarray
    token_bytes: np.ndarray
    facts: Mapping[str, Any]  # the facts that decide the content; {} for a store in memory

    def __post_init__(self) -> None:
        ends = {"offsets": int(self.offsets[-1]), "tokens": len(self.flat)}
        if self.loss_mask is not None:
            ends["mask"] = len(self.loss_mask)
        if len(set(ends.values())) > 1 or len(self.offsets) != len(self.name_offsets):
            raise ValueError(f"array lengths do not match: {ends}")

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.flat)

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    @cached_property
    def lengths(self) -> np.ndarray:
        """[D] int64: number of tokens of each document."""
        return np.diff(self.offsets)

    def length(self, document: int) -> int:
        start, end = self._span(document)
        return end - start

    def tokens(self, document: int, start: int = 0, end: int | None = None) -> np.ndarray:
        """Tokens `start` to `end` of a document, as a view; a slice past its end is shortened."""
        return self._cut(self.flat, document, start, end)

    def mask(self, document: int, start: int = 0, end: int | None = None) -> np.ndarray | None:
        """Which of these tokens are targets; None if all are."""
        return None if self.loss_mask is None else self._cut(self.loss_mask, document, start, end)

    def document_id(self, document: int) -> str:
        self._span(document)
        return bytes(self.names[self.name_offsets[document] : self.name_offsets[document + 1]]).decode()

    def num_bytes(self) -> int:
        """Bytes of text in all documents. Reads every token."""
        chunk = 1 << 22  # 4 M tokens at a time, so that a memory map is not loaded completely
        return sum(int(self.token_bytes[self.flat[i : i + chunk]].sum()) for i in range(0, self.num_tokens, chunk))

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], *, facts: Mapping[str, Any]) -> Self:
        """Build a store from the arrays named above."""
        rest = {name: array for name, array in arrays.items() if name not in ("tokens", "mask")}
        return cls(flat=arrays["tokens"], loss_mask=arrays.get("mask"), facts=facts, **rest)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Self:
        """Open the store in `folder`, memory-mapped."""
        folder = Path(folder)
        try:
            facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            # asarray: slicing a plain array over the map is several times faster than slicing np.memmap
            arrays = {path.stem: np.asarray(np.load(path, mmap_mode="r")) for path in folder.glob("*.npy")}
            return cls.of(arrays, facts=facts)
        except (OSError, EOFError, LookupError, TypeError, ValueError) as error:
            hint = "delete the folder; it will be built again from the source"
            raise BaguError(f"{folder} is not a complete token store: {error}", hint=hint) from error

    def _span(self, document: int) -> tuple[int, int]:
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents}")
        return int(self.offsets[document]), int(self.offsets[document + 1])

    def _cut(self, array: np.ndarray, document: int, start: int, end: int | None) -> np.ndarray:
        first, last = self._span(document)
        stop = last if end is None else min(first + end, last)
        return array[first + start : stop]
