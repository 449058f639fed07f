"""The layout for pretraining: documents one after the other, split every `context` tokens (pack.py)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from bagu.data.order import Order
from bagu.data.pack import Piece, Place, packing_report
from bagu.errors import ArgumentError


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
        return packing_report(
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
