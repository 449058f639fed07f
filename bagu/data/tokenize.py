"""Documents to tokens, in bounded memory and with the tokens of the whole text.

A tokenizer takes about 120 bytes of memory per token while it encodes, so a long document is encoded in pieces. Where
a text may be cut depends on the tokenizer: merges and words must not cross the cut, and some tokenizers treat the start
of a text in another way. So each piece is encoded after the `CONTEXT` characters before it, whose tokens are dropped,
and a cut is used only if the window around it has the same tokens with and without the cut. A text without such a cut
(a run of one letter) stays in one piece.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from bagu.data.document import AnyDocument
from bagu.data.store import TokenDocument
from bagu.data.tokenizer import BpeTokenizer

PIECE = 1 << 18  # characters of a piece of a long document
BATCH = 1 << 21  # characters encoded at once, on all cores
CONTEXT, WINDOW = 64, 512  # characters
REACH, TRIES = 1 << 12, 16  # how far before its place a cut is searched, and how many are tried
BORDER = re.compile(r"(?<=[^\W_])(?=[^\w])")  # the end of a word or number


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


class Piece(NamedTuple):
    """A piece of a document: the text to encode, of which the first `dropped` tokens belong to the piece before."""

    id: str
    text: str
    dropped: int
    ends: bool


def tokenize(
    documents: Iterable[AnyDocument], tokenizer: BpeTokenizer, *, batch: int = BATCH, piece: int = PIECE
) -> Iterator[TokenDocument]:
    """Encode documents in order and append the end-of-text token to each. `batch` characters are encoded at once; a
    document of more than four times `piece` characters is encoded, and returned, in pieces."""
    group: list[Piece] = []
    size = 0
    for one in (p for document in documents for p in pieces(document, tokenizer, piece)):
        if group and size + len(one.text) > batch:
            yield from _encoded(group, tokenizer)
            group, size = [], 0
        group.append(one)
        size += len(one.text)
    yield from _encoded(group, tokenizer)


def _encoded(group: Sequence[Piece], tokenizer: BpeTokenizer) -> Iterator[TokenDocument]:
    for piece, ids in zip(group, tokenizer.encode_batch([p.text for p in group]), strict=True):
        end = [tokenizer.eos_id] if piece.ends else []
        yield TokenDocument(id=piece.id, tokens=[*ids[piece.dropped :], *end], ends=piece.ends)


def pieces(document: AnyDocument, tokenizer: Encoder, size: int) -> Iterator[Piece]:
    """A document in pieces of about `size` characters; a document of less than four times that in one."""
    text, context, target = "", 0, 4 * size  # the first `context` characters of `text` are those before the piece
    for more in document.pieces(size):
        text += more
        if len(text) < context + target + WINDOW:
            continue
        target = size
        while len(text) >= context + target + WINDOW:
            at = find_cut(text, context + target, context, tokenizer)
            if at is None:
                target *= 2  # look again when there is more text
                continue
            yield Piece(document.id, text[:at], len(tokenizer.encode(text[:context])), ends=False)
            start = max(0, at - CONTEXT)
            text, context, target = text[start:], at - start, size
    yield Piece(document.id, text, len(tokenizer.encode(text[:context])), ends=True)


def find_cut(text: str, near: int, least: int, tokenizer: Encoder) -> int | None:
    """A place at `near` or shortly before it, and after `least`, where the text may be cut; None if none is found."""
    found = [m.start() for m in BORDER.finditer(text, max(least + 1, near - REACH), near + 1)]
    found.sort(key=lambda at: (text[at] != " ", -at))  # a space is a border of every known tokenizer
    return next((at for at in found[:TRIES] if may_cut(text, at, tokenizer)), None)


def may_cut(text: str, at: int, tokenizer: Encoder) -> bool:
    """Whether the tokens around a place are the same if the text is cut there."""
    before, after = text[max(0, at - WINDOW) : at], text[at : at + WINDOW]
    context = text[max(0, at - CONTEXT) : at]
    known, joined = tokenizer.encode(context), tokenizer.encode(context + after)
    left = tokenizer.encode(before)
    dropped = len(known)
    return joined[:dropped] == known and tokenizer.encode(before + after) == left + joined[dropped:]
