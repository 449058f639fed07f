"""Packing: the pieces of documents in each row.

A row is `context` tokens, filled with pieces of documents that do not attend to each other. There are two layouts:

* `TokenStream` (token_stream.py): the documents of an epoch are concatenated, in a new order each epoch; the epochs
  follow each other. The stream is split every `context` tokens. There is no padding; a document that crosses a row
  boundary continues in the next row as a separate segment. For pretraining.
* `Bins` (bins.py): best-fit-decreasing. A document that fits in a row is never split. A longer one fills rows of its
  own, and only its remainder is packed with others, so every document can be packed and none is dropped. The free space
  of a row is padding. The rows are built once and shuffled every epoch, so their number is constant. For chats.

Row n of either layout is a function of the key and n only; it does not need the rows before it.

A row holds at most `max_segments` pieces, so that `cu_seqlens` has a fixed length. `Bins` closes a row that reaches it.
In a `TokenStream` a document takes at least `slot` tokens, the smallest number that keeps every row within the limit; a
shorter document is padded to its slot. The length of an epoch is then the same in any order, which makes it possible to
compute row n directly.
"""

from typing import Any, Literal, NamedTuple, Protocol

Packing = Literal["stream", "whole", "joined"]


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


def packing_report(*, rows: float, documents: int, tokens: int, padding: int, split: int, lost: int) -> dict[str, Any]:
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
