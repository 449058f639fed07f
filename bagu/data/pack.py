"""Packing: which pieces of which documents make which row.

A row is `context` tokens, filled with pieces of documents that do not see each other. Two ways to fill it:

* `Tape`: the documents of an epoch are laid end to end in a new order each epoch, the epochs one after another, and the
  tape is cut every `context` tokens. Nothing is padded; a document that crosses a cut goes on in the next row as a
  segment of its own. For pretraining.
* `Bins`: best-fit-decreasing. A document that fits a row is never cut; a longer one fills rows of its own and only its
  rest is packed with others, so no document can block the packer and none is dropped. What stays free in a row is
  padding. The rows are made once and an epoch shuffles them: their number is the same in every epoch. For chats.

Row n of either is a function of the key and n alone, found without making the rows before it.

A row holds at most `max_segments` pieces, so that `cu_seqlens` has a fixed length. `Bins` closes a row that reaches it.
On a `Tape` a document takes at least `slot` tokens, the least with which no row can hold more pieces; what a shorter
document leaves of its slot is padding. So an epoch's tape is as long in any order, which is what makes row n findable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from bagu.errors import ArgumentError

__all__ = ["Bins", "Layout", "Packing", "Piece", "Place", "Tape", "best_fit", "in_order", "philox", "shuffled"]

Packing = Literal["stream", "whole", "joined"]
Order = Callable[[int, int], np.ndarray]  # (epoch, n) -> a permutation of range(n)


class Piece(NamedTuple):
    """Tokens `start` to `end` of a document."""

    document: int
    start: int
    end: int


class Place(NamedTuple):
    """Where a row is: `row` is counted from the beginning of its epoch."""

    epoch: int
    row: int


class Layout(Protocol):
    """An endless sequence of rows."""

    @property
    def rows_per_epoch(self) -> float: ...

    def row(self, number: int) -> list[Piece]: ...

    def place(self, number: int) -> Place: ...

    def report(self) -> dict[str, Any]: ...


def philox(seed: int, *names: str | int) -> np.random.Philox:
    """A counter-based generator for this seed and purpose. Its raw stream is the same in every NumPy version."""
    text = "\0".join(str(part) for part in (seed, *names))
    return np.random.Philox(key=int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little"))


def shuffled(seed: int, name: str) -> Order:
    """A new order for every epoch, a function of (seed, name, epoch)."""

    def order(epoch: int, n: int) -> np.ndarray:
        # not Generator.permutation: NumPy keeps the raw stream between versions, not what Generator makes of it
        return np.argsort(philox(seed, name, epoch).random_raw(n), kind="stable")

    return order


def in_order(epoch: int, n: int) -> np.ndarray:
    return np.arange(n)


@dataclass(frozen=True, kw_only=True)
class _Epoch:
    """The documents of one epoch on the tape: document `order[i]` has the slot edges[i] to edges[i + 1]."""

    order: np.ndarray
    edges: np.ndarray


class Tape:
    """Documents end to end, cut every `context` tokens. After `epochs` (None: never) the rows are empty.

    Neighbours on the tape are cut from the same document, and a step made of neighbours learns that document: rows are
    therefore visited in an order of their own, `spread`, within blocks of an epoch's length (64 Ki rows at most).
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
        """`max_segments` None: any number of pieces in a row, and no padding at all. `spread` None: as they lie."""
        if max_segments is not None and max_segments < 2:
            raise ArgumentError(
                f"a row cut from a stream holds the end of one document and the start of the next, "
                f"and max_segments_per_row is {max_segments}",
                hint="give it at least 2, or set packing='whole'",
            )
        # slots of at least s: at most (C - 2) // s + 2 of them touch a window of C tokens
        self.slot = 1 if max_segments is None else max(1, (context - 2) // (max_segments - 1) + 1)
        self.context, self.epochs = context, epochs
        self.lengths = np.asarray(lengths, np.int64)
        self.slots = np.maximum(self.lengths, self.slot)
        self.epoch_tokens = int(self.slots.sum())  # the tape of one epoch, in any order
        self._order = order
        self._epoch = lru_cache(maxsize=2)(self._lay)  # a row at an epoch's end needs two
        self.block = max(1, min(int(self.rows_per_epoch), 1 << 16))
        self._spread = None if spread is None else lru_cache(maxsize=2)(lambda block: spread(block, self.block))

    @property
    def rows_per_epoch(self) -> float:
        return self.epoch_tokens / self.context

    def place(self, number: int) -> Place:
        epoch, inside = divmod(self._visited(number) * self.context, self.epoch_tokens)
        return Place(epoch, inside // self.context)

    def _visited(self, number: int) -> int:
        """Where on the tape the row visited as `number` lies."""
        if self._spread is None:
            return number
        block, inside = divmod(number, self.block)
        return block * self.block + int(self._spread(block)[inside])

    def row(self, number: int) -> list[Piece]:
        """The pieces of row `number`; one of a small store can span several epochs."""
        number = self._visited(number)
        at, stop = number * self.context, (number + 1) * self.context
        if self.epochs is not None:
            stop = min(stop, self.epochs * self.epoch_tokens)
        pieces: list[Piece] = []
        while at < stop:
            epoch, inside = divmod(at, self.epoch_tokens)
            laid = self._epoch(epoch)
            first = int(np.searchsorted(laid.edges, inside, side="right")) - 1
            last = int(np.searchsorted(laid.edges, inside + stop - at, side="left"))
            for i in range(first, min(last, len(self.lengths))):
                document, edge = int(laid.order[i]), int(laid.edges[i])
                start = max(inside - edge, 0)
                end = min(int(self.lengths[document]), inside + stop - at - edge)
                if start < end:  # else the row begins or ends in what a short document leaves of its slot
                    pieces.append(Piece(document, start, end))
            at = min(stop, (epoch + 1) * self.epoch_tokens)
        return pieces

    def report(self) -> dict[str, Any]:
        laid = self._epoch(0)
        starts = laid.edges[:-1]
        ends = starts + self.lengths[laid.order]
        split = int((starts // self.context != (ends - 1) // self.context).sum())
        tokens = int(self.lengths.sum())
        return _report(
            rows=self.rows_per_epoch,
            documents=len(self.lengths),
            tokens=tokens,
            padding=self.epoch_tokens - tokens,
            split=split,
            lost=0,  # by construction: a slot is as long as its document or longer
        )

    def _lay(self, epoch: int) -> _Epoch:
        order = self._order(epoch, len(self.lengths))
        return _Epoch(order=order, edges=np.concatenate(([0], np.cumsum(self.slots[order]))))


class Bins:
    """Rows packed once by best-fit-decreasing; an epoch visits each once, in a new order."""

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        context: int,
        max_segments: int,
        order: Order,
        useful: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] | None = None,
    ) -> None:
        """`useful(documents, starts, ends)` tells of each piece whether it has a target to learn from. Rows where none
        has are kept apart: they would be steps without a loss. They are counted in the report."""
        self.context = context
        self.lengths = np.asarray(lengths, np.int64)
        self._order = order
        self._cut(max_segments)
        self.visited = np.arange(self.num_rows)
        if useful is not None:
            counts = np.add.reduceat(useful(*self.pieces).astype(np.int64), self.edges[:-1])
            self.visited = np.flatnonzero(counts)
        self._rows = lru_cache(maxsize=2)(lambda epoch: self.visited[order(epoch, len(self.visited))])

    @property
    def num_rows(self) -> int:
        return len(self.edges) - 1

    @property
    def rows_per_epoch(self) -> float:
        return len(self.visited)

    def place(self, number: int) -> Place:
        return Place(*divmod(number, len(self.visited)))

    def row(self, number: int) -> list[Piece]:
        epoch, inside = self.place(number)
        row = self._rows(epoch)[inside]
        span = slice(self.edges[row], self.edges[row + 1])
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
        ) | {"rows_without_targets": self.num_rows - len(self.visited)}

    def _cut(self, max_segments: int) -> None:
        """Fill `pieces` (documents, starts, ends) and `edges`: row r has the pieces edges[r] to edges[r + 1]."""
        full, rest = np.divmod(self.lengths, self.context)
        # the parts of long documents that fill a row: number, and where each begins
        full_docs = np.repeat(np.arange(len(full)), full)
        nth = np.arange(len(full_docs)) - np.repeat(np.cumsum(full) - full, full)
        full_starts = nth * self.context
        # the rests, longest first; documents of one length in a random order, since neighbours in a corpus are alike
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
        self.edges = np.concatenate(([0], np.cumsum(np.bincount(rows))))


def best_fit(sizes: Sequence[int] | np.ndarray, capacity: int, max_pieces: int) -> np.ndarray:
    """The row of each size: of the open rows with room, the one with the least; else a new one.

    The set of free spaces that occur is the bits of one integer, so the least that fits is a shift and a lowest set
    bit. 1 M documents take about 1 s at capacity 2048.
    """
    rows_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # by free space
    free_spaces = 0  # bit f is set where rows_with[f] is not empty
    pieces: list[int] = []  # in each row
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
    """One epoch in numbers."""
    return {
        "rows": rows,
        "documents": documents,
        "tokens": tokens,
        "padding_tokens": padding,
        "padding_percent": 100 * padding / (tokens + padding),
        "split_documents_percent": 100 * split / documents,
        "tokens_lost": lost,
    }
