"""Text sources. A source is a frozen value; reading it returns the same documents in the same order every time.

Documents stream: one line, row group or file is in memory at a time, and of a long text file a piece (document.py). A
document without text is skipped, since it has no targets. A file that cannot be read, or a source without any document,
is an error: a corpus that is silently smaller than expected costs more than a failure.
"""

import codecs
import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from bagu.data.document import LONG, AnyDocument, Document, LongDocument, as_utf8, not_utf8
from bagu.data.encoding import HEAD, Encoding, binary_format, recognise
from bagu.data.folder import Files, is_documentation, kind_of, look
from bagu.data.json_rows import json_rows
from bagu.errors import BaguError

T = TypeVar("T")
STRINGS = r"(dictionary<values=)?(large_)?string(_view)?(, .*>)?"  # Arrow types whose values are strings


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages in the format of chat templates: mappings with at least `role` and `content`.

    `tools` are the tools that the assistant may call, None if there are none. The first `given` messages are a prompt,
    and no answer among them is a target. `place` is the file and line, for errors.
    """

    id: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    given: int = 0
    place: str | None = None


class Source(Protocol):
    @property
    def note(self) -> str:
        """What a reader should know about the files, such as those that are left out; "" if there is nothing."""
        ...

    def documents(self) -> Iterator[AnyDocument]: ...

    def describe(self) -> dict[str, Any]:
        """Name, number of files, bytes on disk, empty files and the corpus hash. Reads every file."""
        ...


@dataclass(frozen=True)
class FileSource:
    """A file, or files of a folder: those that match `glob`, or by default those of the source's kind. `found` is what
    is in the folder, if it was looked at already."""

    path: Path
    glob: str | None = None
    found: Files | None = field(default=None, repr=False, compare=False)
    name: ClassVar[str]  # in the facts about a corpus
    pattern: ClassVar[str]  # of its file names, for messages

    def files(self) -> list[tuple[str, Path]]:
        """(relative name, path) of the files, sorted by name."""
        if self.glob is not None or not self.path.is_dir():
            return list_files(self.path, self.glob or "**/*")
        found = look(self.path) if self.found is None else self.found
        return sorted((_name(file.relative_to(self.path).as_posix()), file) for file in self._own(found))

    @property
    def note(self) -> str:
        """What of a folder is left out, and how many files are decoded from another encoding than UTF-8."""
        if self.glob is not None or not self.path.is_dir():
            return ""
        found = look(self.path) if self.found is None else self.found
        return found.note(self._own(found))

    def _own(self, found: Files) -> Sequence[Path]:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        return describe_files(self.name, written(self.files()))


@dataclass(frozen=True)
class TextSource(FileSource):
    """A text file, or the text files of a folder (Markdown, source code, ...); each file is one document.

    UTF-8 is unchanged but for a byte-order mark. UTF-16, UTF-32 and GB18030 are recognised and decoded (encoding.py).
    """

    name: ClassVar[str] = "text"
    pattern: ClassVar[str] = "**/*.txt"

    def documents(self) -> Iterator[AnyDocument]:
        files = written(self.files())
        return non_empty((_document(name, file) for name, file in files if size_of(file)), self.path)

    def _own(self, found: Files) -> Sequence[Path]:
        if not found.text:
            raise _nothing(self.path, "is a text file")
        return found.text


@dataclass(frozen=True)
class JsonlSource(FileSource):
    """JSON lines or a .json list of objects (also `.gz`), in a file or a folder; `field` of each is a document."""

    field: str = "text"
    name: ClassVar[str] = "jsonl"
    pattern: ClassVar[str] = "**/*.jsonl*"

    def documents(self) -> Iterator[Document]:
        texts = ((row.id, row.text(self.field)) for row in json_rows(written(self.files())))
        return non_empty((Document(id=id, text=text) for id, text in texts if text), self.path)

    def _own(self, found: Files) -> Sequence[Path]:
        return found.json_lines or found.json


@dataclass(frozen=True)
class ParquetSource(FileSource):
    """Parquet, in a file or a folder, read in batches; each value of `column` is one document."""

    column: str = "text"
    name: ClassVar[str] = "parquet"
    pattern: ClassVar[str] = "**/*.parquet"

    def documents(self) -> Iterator[Document]:
        return non_empty((d for name, file in self.files() for d in self._rows(name, file)), self.path)

    def _own(self, found: Files) -> Sequence[Path]:
        return found.parquet

    def _rows(self, name: str, path: Path) -> Iterator[Document]:
        with parquet_file(path) as file:
            kinds = {f.name: str(f.type) for f in file.schema_arrow}
            if self.column not in kinds:
                raise BaguError(f"{path} has no column {self.column!r}", hint=f"it has: {', '.join(kinds)}")
            if not re.fullmatch(STRINGS, kinds[self.column]):
                raise BaguError(f"{path}: column {self.column!r} holds {kinds[self.column]}; expected strings")
            batches = file.iter_batches(columns=[self.column], batch_size=1024)
            values = (value for batch in batches for value in batch.column(0).to_pylist())
            yield from (Document(id=f"{name}:{row}", text=text) for row, text in enumerate(values) if text)


@contextlib.contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    """An open `pyarrow.parquet.ParquetFile`; a failure to read it, also inside the block, names the file."""
    try:
        import pyarrow
        import pyarrow.parquet as pq
    except ImportError as error:
        raise BaguError("reading Parquet needs pyarrow", hint="pip install 'bagu[parquet]'") from error
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise BaguError(f"cannot read {path} as Parquet: {error}", hint="write it again, or leave it out") from error


Kind = type[ParquetSource] | type[JsonlSource] | type[TextSource]
KINDS: dict[str, Kind] = {"parquet": ParquetSource, "json_lines": JsonlSource, "json": JsonlSource, "text": TextSource}


def open_source(path: Path, glob: str | None = None) -> ParquetSource | JsonlSource | TextSource:
    """The source for a path, chosen by file names: Parquet, JSON, or text.

    For a folder, the files that match `glob`; without `glob`, all its files of a kind. Rows beside .txt files, or rows
    of two kinds, are refused: a source reads one kind. Other text beside rows is left out, as the README of a dataset,
    and the source's `note` says so. A .json file is data if it is given directly, matches `glob`, or if the folder has
    no other data. Beside other files it is taken for metadata, as in Hugging Face datasets.
    """
    if not path.is_dir():
        return KINDS[kind_of(path.name)](path)
    if glob is not None:
        kinds = {KINDS[kind_of(file.name)] for file in _matching(path, glob)} or {TextSource}
        return _only(path, kinds)(path, glob=glob)
    found = look(path)
    rows: set[Kind] = {
        kind for kind, files in ((ParquetSource, found.parquet), (JsonlSource, found.json_lines)) if files
    }
    texts = any(file.suffix == ".txt" for file in found.text)
    if not rows and found.json and all(map(is_documentation, found.text)):
        rows = {JsonlSource}
    return _only(path, rows | ({TextSource} if texts or not rows else set()))(path, found=found)


def _only(path: Path, kinds: set[Kind]) -> Kind:
    if len(kinds) == 1:
        return kinds.pop()
    patterns = sorted(kind.pattern for kind in kinds)
    raise BaguError(
        f"{path} holds files of {len(patterns)} kinds: {', '.join(patterns)}",
        hint="give the files or sub-folders one by one, or select files in a run with "
        f"--set sources.NAME.glob='{patterns[-1]}'",
    )


def list_files(path: Path, glob: str) -> list[tuple[str, Path]]:
    """(relative name, path) of the file, or of the matching files in the folder, sorted by name."""
    path = Path(path)
    if path.is_file():
        return [(_name(path.name), path)]
    if not path.is_dir():
        raise BaguError(f"there is no file or folder {path}", hint="check the path and the working folder")
    found = sorted((_name(file.relative_to(path).as_posix()), file) for file in _matching(path, glob))
    if not found:
        raise _nothing(path, f"matches {glob!r}")
    return found


def _nothing(path: Path, what: str) -> BaguError:
    hint = "give the files by name, or select them in a run with --set sources.NAME.glob='**/*.md'"
    return BaguError(f"no file under {path} {what}", hint=hint)


def _matching(folder: Path, glob: str) -> list[Path]:
    try:
        return [file for file in folder.glob(glob) if file.is_file()]
    except (NotImplementedError, ValueError) as error:  # an absolute pattern; "" or "a**b"
        hint = "give one relative to the folder, such as **/*.md"
        raise BaguError(f"the pattern {glob!r} selects no files of {folder}: {error}", hint=hint) from error


def _name(name: str) -> str:
    """A relative name, which is part of document ids and hashes. Python decodes other bytes of it to surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise BaguError(f"the file name {name!a} is not UTF-8", hint="rename the file, or leave it out") from error
    return name


def read(path: Path) -> bytes:
    with readable(path) as file:
        return file.read()


def decode(path: Path, data: bytes) -> str:
    return data.decode(_encoding(path, data, complete=True))


def _encoding(path: Path, data: bytes, *, complete: bool) -> Encoding:
    """The encoding of a file that starts with `data`."""
    content = recognise(data, complete=complete)
    if content == "binary":
        format = binary_format(data)
        known = f" ({format})" if format else ""
        raise BaguError(f"{path} is a binary file{known}, not text", hint="convert it to text, or leave it out")
    if content != "unknown":
        return content
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from error
    raise AssertionError("what can be decoded as UTF-8 is not unknown")


def _document(name: str, path: Path) -> AnyDocument:
    """A text file. A long one is read in pieces, each by itself, so that no file stays open."""
    size = size_of(path)
    if size <= LONG:
        return Document(id=name, text=decode(path, read(path)))

    def piece(at: int, length: int) -> bytes:
        with readable(path) as file:
            file.seek(at)
            return file.read(length)

    encoding = _encoding(path, piece(0, HEAD), complete=False)
    if encoding not in ("utf-8", "utf-8-sig"):
        return as_utf8(name, piece, size, encoding, str(path))
    start = len(codecs.BOM_UTF8) if encoding == "utf-8-sig" else 0
    return LongDocument(id=name, read=piece, start=start, end=size, place=str(path))


def written(files: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """The files; one with a hole is refused before it is read. A hole reads as zeros, which are no text."""
    long = ((path, size) for _, path in files if (size := size_of(path)) > LONG)
    for path, size in long if hasattr(os, "SEEK_HOLE") else ():
        with readable(path) as file:
            if (at := file.seek(0, os.SEEK_HOLE)) < size:
                raise BaguError(
                    f"{path} is a sparse file: of its {size:,} bytes, those from byte {at:,} on were never written",
                    hint="it is an incomplete copy; copy it again or leave it out",
                )
    return files


def describe_files(name: str, files: list[tuple[str, Path]]) -> dict[str, Any]:
    """Facts about the files. `sha256` covers each relative name and content hash, so different corpora differ in it."""
    corpus, size, empty = hashlib.sha256(), 0, 0
    for relative, path in files:
        digest, length = hash_file(path)
        corpus.update(f"{relative}\0{digest}\n".encode())
        size += length
        empty += not length
    return {"name": name, "files": len(files), "empty_files": empty, "bytes": size, "sha256": corpus.hexdigest()}


def hash_file(path: Path) -> tuple[str, int]:
    """SHA-256 and size, computed in chunks."""
    with readable(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), file.tell()


def size_of(path: Path) -> int:
    with readable(path) as file:
        return os.fstat(file.fileno()).st_size


@contextlib.contextmanager
def readable(path: Path) -> Iterator[BufferedReader]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        hint = "change its permissions, or leave it out"
        raise BaguError(f"cannot read {path}: {error.strerror or error}", hint=hint) from error


def non_empty(items: Iterable[T], path: Path | str) -> Iterator[T]:
    """Yield the items; raise if there were none."""
    empty = True
    for item in items:
        empty = False
        yield item
    if empty:
        raise BaguError(f"{path} has no document with text", hint="check the path")
