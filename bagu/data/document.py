"""Documents: a text in memory, or a long one that is read in pieces; and a shelf that holds any number of them.

A text of more than `LONG` bytes is never held whole. Its readers (tokenizing, near-duplicates, the split, the sample
for a tokenizer) take `pieces`, so their memory does not grow with the corpus.
"""

from __future__ import annotations

import codecs
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from bagu.errors import BaguError
from bagu.machine.cache import cache_folder

LONG = 1 << 23  # bytes: a longer text is read in pieces
BLOCK = 1 << 20  # characters of a piece for readers that do not care
READ = 1 << 16  # bytes read at once; with 1 MiB, glibc's heap grew by 0.7 bytes per byte read
IN_MEMORY = 1 << 26  # bytes of text that a shelf holds before it writes to disk

Read = Callable[[int, int], bytes]  # the bytes at an offset, of a length


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """`id` is unique in its source and equal on every machine: a relative path, or file and line."""

    id: str
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())

    def pieces(self, size: int) -> Iterator[str]:
        """The text in pieces of `size` characters; the last one may be shorter."""
        return (self.text[at : at + size] for at in range(0, len(self.text), size))

    def between(self, start: int, end: int | None, id: str) -> Document:
        """The characters `start` to `end` as a document."""
        return Document(id=id, text=self.text[start:end])


@dataclass(frozen=True, kw_only=True, slots=True)
class LongDocument:
    """The bytes `start` to `end` of `read`, UTF-8. `place` is the file, for errors."""

    id: str
    read: Read
    start: int
    end: int
    place: str

    @property
    def text(self) -> str:
        return "".join(self.pieces(BLOCK))

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    def pieces(self, size: int) -> Iterator[str]:
        kept = ""
        for text in self._blocks():
            kept += text
            full = len(kept) // size * size
            yield from (kept[at : at + size] for at in range(0, full, size))
            kept = kept[full:]
        if kept:
            yield kept

    def between(self, start: int, end: int | None, id: str) -> LongDocument:
        first = self._byte(start)
        last = self.end if end is None else self._byte(end)
        return LongDocument(id=id, read=self.read, start=first, end=last, place=self.place)

    def _byte(self, character: int) -> int:
        """The offset in bytes of a character."""
        at = self.start
        for piece in self.pieces(BLOCK):
            if character <= len(piece):
                return at + len(piece[:character].encode())
            character -= len(piece)
            at += len(piece.encode())
        return self.end

    def _blocks(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        for at in range(self.start, self.end, READ):
            data = self.read(at, min(READ, self.end - at))
            if len(data) == READ and data.count(0) == READ:
                hint = "it is no text, or an incomplete copy; copy it again or leave it out"
                raise BaguError(f"{self.place} has {READ:,} zero bytes in a row from byte {at:,} on", hint=hint)
            waiting = len(decoder.getstate()[0])  # bytes of a character that the border cuts
            last = at + READ >= self.end
            yield _decoded(decoder, data, self.place, at - waiting, last=last)


def _decoded(decoder: codecs.IncrementalDecoder, data: bytes, place: str, at: int, *, last: bool) -> str:
    try:
        return decoder.decode(data, last)
    except UnicodeDecodeError as error:
        raise not_utf8(place, error, at) from error


def not_utf8(place: Path | str, error: UnicodeDecodeError, at: int = 0) -> BaguError:
    """The error for bytes that cannot be decoded; the decoder's data begins at byte `at`."""
    hint = "convert it (iconv -f latin1 -t utf-8), or leave it out"
    return BaguError(f"{place} is not UTF-8: {error.reason} at byte {at + error.start}", hint=hint)


def as_utf8(id: str, read: Read, size: int, encoding: str, place: str) -> LongDocument:
    """A long text in another encoding, copied to a scratch file as UTF-8."""
    decoder, file, lock = codecs.getincrementaldecoder(encoding)(), scratch_file(), threading.Lock()
    for at in range(0, size, READ):
        try:
            file.write(decoder.decode(read(at, READ), at + READ >= size).encode())
        except UnicodeDecodeError as error:
            hint = "correct those bytes, or leave it out"
            raise BaguError(f"{place} begins as {encoding}: {error.reason} near byte {at:,}", hint=hint) from error

    def piece(at: int, length: int) -> bytes:
        with lock:
            file.seek(at)
            return file.read(length)

    return LongDocument(id=id, read=piece, start=0, end=file.tell(), place=place)


AnyDocument = Document | LongDocument


def scratch_file() -> tempfile.SpooledTemporaryFile[bytes]:
    """A file that is in memory up to `IN_MEMORY` bytes, and then in the cache folder (/tmp may be memory). It goes with
    its last reference."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return tempfile.SpooledTemporaryFile(IN_MEMORY, dir=str(folder), prefix="scratch.")


class Shelf(Sequence[AnyDocument]):
    """Documents by number: their ids in memory, their texts in a scratch file. A long document that is a file of its
    own is not copied."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._spans = array("q")  # start and end in the file; -1 and a number for a document that stays elsewhere
        self._elsewhere: list[LongDocument] = []
        self._file = scratch_file()
        self._end, self._lock = 0, threading.Lock()

    def append(self, document: AnyDocument) -> None:
        self.ids.append(document.id)
        if isinstance(document, LongDocument):
            self._spans.extend((-1, len(self._elsewhere)))
            self._elsewhere.append(document)
            return
        data = document.text.encode()
        try:
            with self._lock:
                self._file.seek(self._end)
                self._file.write(data)
        except OSError as error:
            hint = "free some disk space, or set BAGU_CACHE to a folder that has some"
            raise BaguError(f"cannot keep the text in the cache folder {cache_folder()}: {error}", hint=hint) from error
        self._spans.extend((self._end, self._end + len(data)))
        self._end += len(data)

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, number: int) -> AnyDocument: ...
    @overload
    def __getitem__(self, number: slice) -> list[AnyDocument]: ...
    def __getitem__(self, number: int | slice) -> AnyDocument | list[AnyDocument]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        number = range(len(self))[number]  # raises IndexError; -1 is the last
        id, start, end = self.ids[number], self._spans[2 * number], self._spans[2 * number + 1]
        if start < 0:
            return self._elsewhere[end]
        if end - start > LONG:
            return LongDocument(id=id, read=self._read, start=start, end=end, place=id)
        return Document(id=id, text=self._read(start, end - start).decode())

    def _read(self, start: int, size: int) -> bytes:
        with self._lock:
            self._file.seek(start)
            return self._file.read(size)
