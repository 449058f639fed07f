"""Split documents into training and validation. Of a single document, the end is held out.

For several documents a hash of the id and the seed decides: adding documents does not move the others, and pairs made
from a held-out file can be held out by the same rule. Split after deduplication; otherwise validation would measure
copies of training documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bagu.data.source import Document
from bagu.errors import BaguError


class Split(NamedTuple):
    train: list[Document]
    validation: list[Document]


def place(document_id: str, *, seed: int, purpose: str = "split") -> float:
    """A number in [0, 1) for the document, which is held out if it is below the validation fraction.

    Different purposes are independent under the same seed.
    """
    hashed = hashlib.blake2b(document_id.encode(), key=str(seed).encode(), person=purpose.encode(), digest_size=8)
    return (int.from_bytes(hashed.digest()) >> 11) / 2**53  # 53 bits: exact in a float


def held_ids(ids: Sequence[str], *, fraction: float, seed: int = 0) -> frozenset[str]:
    """About `fraction` of the ids, at least one; at least one remains for training."""
    if not 0 < fraction < 1:
        raise BaguError(f"the validation fraction is {fraction}", hint="give a number between 0 and 1, e.g. 0.05")
    places = {id: place(id, seed=seed) for id in ids}
    if len(places) < max(2, len(ids)):
        found = f"{len(ids)} with {len(places)} different ids"
        raise BaguError(
            f"cannot hold out documents or chats for validation: there are {found}",
            hint="give two or more, each with its own id",
        )
    least, most = min(places, key=lambda id: places[id]), max(places, key=lambda id: places[id])
    return frozenset({id for id, at in places.items() if at < fraction} - {most} | {least})


def hold_out(documents: Iterable[Document], *, fraction: float, seed: int = 0) -> Split:
    """Hold out about `fraction` of the documents, selected by `held_ids`, in order. A single document is split in
    two."""
    documents = list(documents)
    if len(documents) == 1 and 0 < fraction < 1:
        return _cut(documents[0], fraction)
    held = held_ids([document.id for document in documents], fraction=fraction, seed=seed)
    return Split(
        train=[document for document in documents if document.id not in held],
        validation=[document for document in documents if document.id in held],
    )


def _cut(document: Document, fraction: float) -> Split:
    """Hold out the last `fraction` of a document, up to twice as much to start at the beginning of a line."""
    text = document.text
    if len(text) < 2:
        raise BaguError(f"{document.id} has {len(text)} characters, too few to hold one out", hint="give more text")
    at = min(max(round(len(text) * (1 - fraction)), 1), len(text) - 1)
    line = text.rfind("\n", 0, at) + 1
    if line and at - line <= len(text) - at:
        at = line
    held = Document(id=f"{document.id}:end", text=text[at:])
    return Split(train=[Document(id=document.id, text=text[:at])], validation=[held])


def sample(documents: Iterable[Document], *, max_bytes: int, total_bytes: int, seed: int = 0) -> Iterator[str]:
    """About `max_bytes` of the `total_bytes` of text, spread over the corpus; all of it if it is smaller.

    The sample consists of pieces of 64 Ki characters, which works for many short documents and for a long one.
    """
    share, size, piece = max_bytes / max(total_bytes, 1), 0, 1 << 16
    for document in documents:
        for start in range(0, len(document.text), piece):
            chosen = place(f"{document.id}:{start}", seed=seed, purpose="sample") < share
            if chosen and size < max_bytes:
                text = document.text[start : start + piece]
                size += len(text.encode())
                yield text
