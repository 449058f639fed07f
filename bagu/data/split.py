"""Split documents into training and validation. Of a single document, the end is held out.

For several documents a hash of the id and the seed decides: adding documents does not move the others, and pairs made
from a held-out file can be held out by the same rule. Split after deduplication; otherwise validation would measure
copies of training documents.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bagu.data.document import AnyDocument, Document
from bagu.errors import BaguError

PIECE = 1 << 16  # characters


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
        only, at = documents[0], end_of_training(documents[0], fraction)
        return Split(train=[only.between(0, at, only.id)], validation=[only.between(at, None, f"{only.id}:end")])
    held = held_ids([document.id for document in documents], fraction=fraction, seed=seed)
    return Split(
        train=[document for document in documents if document.id not in held],
        validation=[document for document in documents if document.id in held],
    )


def end_of_training(document: AnyDocument, fraction: float) -> int:
    """Where the last `fraction` of a document starts, up to twice as much to start at the beginning of a line."""
    size = sum(map(len, document.pieces(PIECE)))
    if size < 2:
        raise BaguError(f"{document.id} has {size} characters, too few to hold one out", hint="give more text")
    at = min(max(round(size * (1 - fraction)), 1), size - 1)
    line = 0
    for start, piece in zip(range(0, at, PIECE), document.pieces(PIECE), strict=False):
        line = start + found + 1 if (found := piece.rfind("\n", 0, at - start)) >= 0 else line
    return line if line and at - line <= size - at else at


def sample(documents: Iterable[AnyDocument], *, max_bytes: int, total_bytes: int, seed: int = 0) -> Iterator[str]:
    """About `max_bytes` of the `total_bytes` of text, spread over the corpus; all of it if it is smaller.

    The sample consists of pieces of 64 Ki characters, which works for many short documents and for a long one.
    """
    share, size = max_bytes / max(total_bytes, 1), 0
    for document in documents:
        for number, text in enumerate(document.pieces(PIECE)):
            if size >= max_bytes:
                return
            if place(f"{document.id}:{number * PIECE}", seed=seed, purpose="sample") < share:
                size += len(text.encode())
                yield text
