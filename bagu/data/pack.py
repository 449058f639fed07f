"""Packing: the pieces of documents in each row.

A row is `context` tokens, filled with pieces of documents that do not attend to each other. There are two layouts:

* `TokenStream`: the documents of an epoch are concatenated, in a new order each epoch; the epochs follow each other.
  The stream is split every `context` tokens. There is no padding; a document that crosses a row boundary continues in
  the next row as a separate segment. For pretraining.
* `Bins`: best-fit-decreasing. A document that fits in a row is never split. A longer one fills rows of its own, and
  only its remainder is packed with others, so every document can be packed and none is dropped. The free space of a
  row is padding. The rows are built once and shuffled every epoch, so their number is constant. For chats.

Row n of either layout is a function of the key and n only; it does not need the rows before it.

A row holds at most `max_segments` pieces, so that `cu_seqlens` has a fixed length. `Bins` closes a row that reaches it.
In a `TokenStream` a document takes at least `slot` tokens, the smallest number that keeps every row within the limit; a
shorter document is padded to its slot. The length of an epoch is then the same in any order, which makes it possible to
compute row n directly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from bagu.errors import ArgumentError

__all__ = ["Bins", "Layout", "Packing", "Piece", "Place", "TokenStream", "best_fit", "in_order", "philox", "shuffled"]

Packing = Literal["stream", "whole", "joined"]
Order = Callable[[int, int], np.ndarray]  # (epoch, n) -> a permutation of range(n)


class Piece(NamedTuple):
    """Tokens `start` to `end` of a document."""

    document: int
    start: int
    end: int


class Place(NamedTuple):
    """The position of a row: `row` counts from the start of its epoch."""

    epoch: int
    row: int


class Layout(Protocol):
    """An infinite sequence of rows."""

    @property
    def rows_per_epoch(self) -> float: ...

    def row(self, number: int) -> list[Piece]: ...

    def place(self, number: int) -> Place: ...

    def report(self) -> dict[str, Any]: ...


def philox(seed: int, *names: str | int) -> np.random.Philox:
    """A counter-based generator for this seed and purpose. Its raw output is the same in every NumPy version."""
    text = "\0".join(str(part) for part in (seed, *names))
    return np.random.Philox(key=int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little"))


def shuffled(seed: int, name: str) -> Order:
    """A new order for every epoch, a function of (seed, name, epoch)."""

    def order(epoch: int, n: int) -> np.ndarray:
        # not Generator.permutation: NumPy keeps the raw output stable between versions, but not Generator's methods
        return np.argsort(philox(seed, name, epoch).random_raw(n), kind="stable")

    return order


def in_order(epoch: int, n: int) -> np.ndarray:
    return np.arange(n)


@dataclass(frozen=True, kw_only=True)
class _Epoch:
    """The documents of one epoch in the stream: document `order[i]` has the tokens offsets[i] to offsets[i + 1]."""

    order: np.ndarray
    offsets: np.ndarray


class TokenStream:
    """Concatenated documents, split every `context` tokens. After `epochs` (None: unlimited) the rows are empty.

    Neighbouring rows come from the same document, and a step of neighbouring rows would overfit to it. Rows are
    therefore shuffled by `spread`, within blocks of an epoch's length (at most 64 Ki rows).
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        context: int,
        max_segments: int | None,
        order: Order,
        spread: Order | None = None,
        epochs: int | None = None,
    ) -> None:
        """`max_segments` None: any number of pieces in a row, and no padding. `spread` None: rows are not shuffled."""
        if max_segments is not None and max_segments < 2:
            raise ArgumentError(
                f"max_segments_per_row is {max_segments}, but a row of packing='stream' can hold the end of one "
                f"document and the start of the next",
                hint="give at least 2, or set packing='whole'",
            )
        # slots of at least s tokens: at most (C - 2) // s + 2 of them overlap a window of C tokens
        self.slot = 1 if max_segments is None else max(1, (context - 2) // (max_segments - 1) + 1)
        self.context, self.epochs = context, epochs
        self.lengths = np.asarray(lengths, np.int64)
        self.slots = np.maximum(self.lengths, self.slot)
        self.epoch_tokens = int(self.slots.sum())  # the length of one epoch, in any order
        self._order = order
        self._epoch = lru_cache(maxsize=2)(self._concatenate)  # a row at the end of an epoch needs two
        self.block = max(1, min(int(self.rows_per_epoch), 1 << 16))
        self._spread = None if spread is None else lru_cache(maxsize=2)(lambda block: spread(block, self.block))

    @property
    def rows_per_epoch(self) -> float:
        return self.epoch_tokens / self.context

    def place(self, number: int) -> Place:
        epoch, inside = divmod(self._position(number) * self.context, self.epoch_tokens)
        return Place(epoch, inside // self.context)

    def _position(self, number: int) -> int:
        """The position in the stream of the row with this number."""
        if self._spread is None:
            return number
        block, inside = divmod(number, self.block)
        return block * self.block + int(self._spread(block)[inside])

    def row(self, number: int) -> list[Piece]:
        """The pieces of row `number`. A row of a small store may span several epochs."""
        number = self._position(number)
        at, stop = number * self.context, (number + 1) * self.context
        if self.epochs is not None:
            stop = min(stop, self.epochs * self.epoch_tokens)
        pieces: list[Piece] = []
        while at < stop:
            epoch, inside = divmod(at, self.epoch_tokens)
            documents = self._epoch(epoch)
            first = int(np.searchsorted(documents.offsets, inside, side="right")) - 1
            last = int(np.searchsorted(documents.offsets, inside + stop - at, side="left"))
            for i in range(first, min(last, len(self.lengths))):
                document, offset = int(documents.order[i]), int(documents.offsets[i])
                start = max(inside - offset, 0)
                end = min(int(self.lengths[document]), inside + stop - at - offset)
                if start < end:  # else the row starts or ends in the padding of a short document
                    pieces.append(Piece(document, start, end))
            at = min(stop, (epoch + 1) * self.epoch_tokens)
        return pieces

    def report(self) -> dict[str, Any]:
        documents = self._epoch(0)
        starts = documents.offsets[:-1]
        ends = starts + self.lengths[documents.order]
        split = int((starts // self.context != (ends - 1) // self.context).sum())
        tokens = int(self.lengths.sum())
        return _report(
            rows=self.rows_per_epoch,
            documents=len(self.lengths),
            tokens=tokens,
            padding=self.epoch_tokens - tokens,
            split=split,
            lost=0,  # a slot is at least as long as its document
        )

    def _concatenate(self, epoch: int) -> _Epoch:
        order = self._order(epoch, len(self.lengths))
        return _Epoch(order=order, offsets=np.concatenate(([0], np.cumsum(self.slots[order]))))


class Bins:
    """Rows packed once by best-fit-decreasing; an epoch uses each row once, in a new order."""

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        context: int,
        max_segments: int,
        order: Order,
        useful: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] | None = None,
    ) -> None:
        """`useful(documents, starts, ends)` returns whether each piece has a target. Rows without any target are not
        used, because such a step has no loss. The report counts them."""
        self.context = context
        self.lengths = np.asarray(lengths, np.int64)
        self._order = order
        self._cut(max_segments)
        self.used = np.arange(self.num_rows)
        if useful is not None:
            counts = np.add.reduceat(useful(*self.pieces).astype(np.int64), self.offsets[:-1])
            self.used = np.flatnonzero(counts)
        self._rows = lru_cache(maxsize=2)(lambda epoch: self.used[order(epoch, len(self.used))])

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def rows_per_epoch(self) -> float:
        return len(self.used)

    def place(self, number: int) -> Place:
        return Place(*divmod(number, len(self.used)))

    def row(self, number: int) -> list[Piece]:
        epoch, inside = self.place(number)
        row = self._rows(epoch)[inside]
        span = slice(self.offsets[row], self.offsets[row + 1])
        return [Piece(*piece) for piece in zip(*(column[span].tolist() for column in self.pieces), strict=True)]

    def report(self) -> dict[str, Any]:
        documents, starts, ends = self.pieces
        tokens = int(self.lengths.sum())
        packed = int((ends - starts).sum())
        return _report(
            rows=self.num_rows,
            documents=len(self.lengths),
            tokens=tokens,
            padding=self.num_rows * self.context - packed,
            split=int((np.bincount(documents, minlength=len(self.lengths)) > 1).sum()),
            lost=tokens - packed,
        ) | {"rows_without_targets": self.num_rows - len(self.used)}

    def _cut(self, max_segments: int) -> None:
        """Compute `pieces` (documents, starts, ends) and `offsets`: row r has the pieces offsets[r] to offsets[r +
        1]."""
        full, rest = np.divmod(self.lengths, self.context)
        # the parts of long documents that fill a row: document, and start of each part
        full_docs = np.repeat(np.arange(len(full)), full)
        nth = np.arange(len(full_docs)) - np.repeat(np.cumsum(full) - full, full)
        full_starts = nth * self.context
        # the remainders, longest first; documents of equal length in random order, since neighbours in a corpus
        # correlate
        order = self._order(0, len(rest))
        order = order[rest[order] > 0]
        order = order[np.argsort(-rest[order], kind="stable")]
        rows = np.concatenate(
            (np.arange(len(full_docs)), len(full_docs) + best_fit(rest[order], self.context, max_segments))
        )
        by_row = np.argsort(rows, kind="stable")
        documents = np.concatenate((full_docs, order))[by_row]
        starts = np.concatenate((full_starts, full[order] * self.context))[by_row]
        self.pieces = (documents, starts, np.minimum(starts + self.context, self.lengths[documents]))
        self.offsets = np.concatenate(([0], np.cumsum(np.bincount(rows))))


def best_fit(sizes: Sequence[int] | np.ndarray, capacity: int, max_pieces: int) -> np.ndarray:
    """The row of each size: the open row with the least sufficient space, or a new row.

    The bits of one integer mark which amounts of free space exist, so the best fit is a shift and a lowest set bit. 1 M
    documents take about 1 s at capacity 2048.
    """
    rows_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # by free space
    free_spaces = 0  # bit f is set if rows_with[f] is not empty
    pieces: list[int] = []  # number of pieces in each row
    chosen = np.empty(len(sizes), np.int64)
    for i, size in enumerate(np.asarray(sizes).tolist()):
        fitting = free_spaces >> size
        if fitting:
            free = size + (fitting & -fitting).bit_length() - 1
            row = rows_with[free].pop()
            if not rows_with[free]:
                free_spaces ^= 1 << free
        else:
            free, row = capacity, len(pieces)
            pieces.append(0)
        chosen[i] = row
        pieces[row] += 1
        left = free - size
        if left and pieces[row] < max_pieces:
            rows_with[left].append(row)
            free_spaces |= 1 << left
    return chosen


def _report(*, rows: float, documents: int, tokens: int, padding: int, split: int, lost: int) -> dict[str, Any]:
    """Statistics of one epoch."""
    return {
        "rows": rows,
        "documents": documents,
        "tokens": tokens,
        "padding_tokens": padding,
        "padding_percent": 100 * padding / (tokens + padding),
        "split_documents_percent": 100 * split / documents,
        "tokens_lost": lost,
    }
