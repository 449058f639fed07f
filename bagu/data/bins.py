"""The layout for chats: whole documents in rows by best-fit-decreasing (pack.py)."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from bagu.data.order import Order
from bagu.data.pack import Piece, Place, packing_report


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
        return packing_report(
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
