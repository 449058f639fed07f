"""Train and validation, by document; of a single one, its end is held out.

Where one of several goes is decided by a hash of its id and the seed alone: adding more moves none of the others, and
pairs made from a held-out file can be held out by the same rule. Split after de-duplication, or copies of a training
document are what the validation measures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bagu.data.source import Document
from bagu.errors import BaguError

__all__ = ["Split", "held_ids", "hold_out", "place", "sample"]


class Split(NamedTuple):
    train: list[Document]
    validation: list[Document]


def place(document_id: str, *, seed: int, purpose: str = "split") -> float:
    """A number in [0, 1) for the document: it is held out when this is below the validation share.

    Choices made for different purposes are independent under one seed.
    """
    hashed = hashlib.blake2b(document_id.encode(), key=str(seed).encode(), person=purpose.encode(), digest_size=8)
    return (int.from_bytes(hashed.digest()) >> 11) / 2**53  # 53 bits: a float holds them all


def held_ids(ids: Sequence[str], *, fraction: float, seed: int = 0) -> frozenset[str]:
    """About `fraction` of the ids, at least one; at least one is left to train on."""
    if not 0 < fraction < 1:
        raise BaguError(f"the validation fraction is {fraction}", hint="a number between 0 and 1, 0.05 say")
    places = {id: place(id, seed=seed) for id in ids}
    if len(places) < max(2, len(ids)):
        found = f"{len(ids)} with {len(places)} different ids"
        raise BaguError(
            f"some documents or chats are held out to measure on, and there are {found}",
            hint="give two or more, each with an id of its own",
        )
    least, most = min(places, key=lambda id: places[id]), max(places, key=lambda id: places[id])
    return frozenset({id for id, at in places.items() if at < fraction} - {most} | {least})


def hold_out(documents: Iterable[Document], *, fraction: float, seed: int = 0) -> Split:
    """Hold out about `fraction` of the documents, as `held_ids` says. Order is kept. A single one is cut in two."""
    documents = list(documents)
    if len(documents) == 1 and 0 < fraction < 1:
        return _cut(documents[0], fraction)
    held = held_ids([document.id for document in documents], fraction=fraction, seed=seed)
    return Split(
        train=[document for document in documents if document.id not in held],
        validation=[document for document in documents if document.id in held],
    )


def _cut(document: Document, fraction: float) -> Split:
    """The last `fraction` of a document held out of it; up to twice as much, to begin with a line."""
    text = document.text
    if len(text) < 2:
        raise BaguError(f"{document.id} has {len(text)} characters, and one is held out", hint="give more text")
    at = min(max(round(len(text) * (1 - fraction)), 1), len(text) - 1)
    line = text.rfind("\n", 0, at) + 1
    if line and at - line <= len(text) - at:
        at = line
    held = Document(id=f"{document.id}:end", text=text[at:])
    return Split(train=[Document(id=document.id, text=text[:at])], validation=[held])


def sample(documents: Iterable[Document], *, max_bytes: int, total_bytes: int, seed: int = 0) -> Iterator[str]:
    """About `max_bytes` of `total_bytes` of text, spread over the whole corpus; all of it when it is smaller.

    Pieces of 64 Ki characters are chosen, so that a corpus may be many short documents or one long one.
    """
    share, size, piece = max_bytes / max(total_bytes, 1), 0, 1 << 16
    for document in documents:
        for start in range(0, len(document.text), piece):
            chosen = place(f"{document.id}:{start}", seed=seed, purpose="sample") < share
            if chosen and size < max_bytes:
                text = document.text[start : start + piece]
                size += len(text.encode())
                yield text
