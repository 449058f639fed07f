"""Text sources. A source is a frozen value; reading it returns the same documents in the same order every time.

Documents stream: one line, row group or file is in memory at a time, and of a long text file a piece (document.py). A
document without text is skipped, since it has no targets. A file that cannot be read, or a source without any document,
is an error: a corpus that is silently smaller than expected costs more than a failure.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol, TypeVar

from bagu.data.document import LONG, AnyDocument, Document, LongDocument, not_utf8
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
    def documents(self) -> Iterator[AnyDocument]: ...

    def describe(self) -> dict[str, Any]:
        """Name, number of files, bytes on disk, empty files and the corpus hash. Reads every file."""
        ...


@dataclass(frozen=True)
class TextSource:
    """A text file, or the files in a folder that match `glob`; each file is one document, UTF-8, unchanged."""

    path: Path
    glob: str = "**/*.txt"

    def documents(self) -> Iterator[AnyDocument]:
        files = written(list_files(self.path, self.glob))
        return non_empty((_document(name, file) for name, file in files if size_of(file)), self.path)

    def describe(self) -> dict[str, Any]:
        return describe_files("text", written(list_files(self.path, self.glob)))


@dataclass(frozen=True)
class JsonlSource:
    """JSON lines or a .json list of objects (also `.gz`), in a file or a folder; `field` of each is a document."""

    path: Path
    field: str = "text"
    glob: str = "**/*.jsonl*"

    def documents(self) -> Iterator[Document]:
        rows = json_rows(written(list_files(self.path, self.glob)))
        texts = ((row.id, row.text(self.field)) for row in rows)
        return non_empty((Document(id=id, text=text) for id, text in texts if text), self.path)

    def describe(self) -> dict[str, Any]:
        return describe_files("jsonl", written(list_files(self.path, self.glob)))


@dataclass(frozen=True)
class ParquetSource:
    """Parquet, in a file or a folder, read in batches; each value of `column` is one document."""

    path: Path
    column: str = "text"
    glob: str = "**/*.parquet"

    def documents(self) -> Iterator[Document]:
        files = list_files(self.path, self.glob)
        return non_empty((d for name, file in files for d in self._rows(name, file)), self.path)

    def describe(self) -> dict[str, Any]:
        return describe_files("parquet", list_files(self.path, self.glob))

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


def open_source(path: Path, glob: str | None = None) -> ParquetSource | JsonlSource | TextSource:
    """The source for a path, chosen by file names: Parquet, JSON, or text.

    For a folder, the files that match `glob`; without `glob`, the files of the three kinds. Files of two kinds are
    refused: a source reads one kind and would silently skip the others. A .json file is data if it is given directly,
    matches `glob`, or if the folder has no other data. Beside other files it is taken for metadata, as in Hugging Face
    datasets.
    """
    if not path.is_dir():
        return (JsonlSource if is_json(path) else kind_of(path) or TextSource)(path)
    other = None if glob is None else TextSource  # other file names are text if glob asks for them
    files = _matching(path, glob or "**/*")
    found = {JsonlSource if glob and is_json(file) else kind_of(file) or other for file in files}
    if glob is None and found <= {None} and any(map(is_json, files)):
        return JsonlSource(path, glob="**/*.json*")
    kinds = sorted((kind for kind in found if kind is not None), key=lambda kind: kind.glob)
    if len(kinds) > 1:
        raise BaguError(
            f"{path} holds files of {len(kinds)} kinds: {', '.join(kind.glob for kind in kinds)}",
            hint="give the files or sub-folders one by one, or select files in a run with "
            f"--set sources.NAME.glob='{kinds[-1].glob}'",
        )
    kind = kinds[0] if kinds else TextSource
    return kind(path) if glob is None else kind(path, glob=glob)


def is_json(file: Path) -> bool:
    return file.name.removesuffix(".gz").endswith(".json")


def kind_of(file: Path) -> Kind | None:
    """The kind of source that reads files with this name."""
    if file.name.removesuffix(".gz").endswith(".ndjson"):  # another name of JSON lines
        return JsonlSource
    kinds: tuple[Kind, ...] = (ParquetSource, JsonlSource, TextSource)
    return next((kind for kind in kinds if file.match(Path(kind.glob).name)), None)


def list_files(path: Path, glob: str) -> list[tuple[str, Path]]:
    """(relative name, path) of the file, or of the matching files in the folder, sorted by name."""
    path = Path(path)
    if path.is_file():
        return [(_name(path.name), path)]
    if not path.is_dir():
        raise BaguError(f"there is no file or folder {path}", hint="check the path and the working folder")
    found = sorted((_name(file.relative_to(path).as_posix()), file) for file in _matching(path, glob))
    if not found:
        raise BaguError(
            f"no file under {path} matches {glob!r}",
            hint="give the files by name, or select them in a run with --set sources.NAME.glob='**/*.md'",
        )
    return found


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
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from error


def _document(name: str, path: Path) -> AnyDocument:
    """A text file. A long one is read in pieces, each by itself, so that no file stays open."""
    size = size_of(path)
    if size <= LONG:
        return Document(id=name, text=decode(path, read(path)))

    def piece(at: int, length: int) -> bytes:
        with readable(path) as file:
            file.seek(at)
            return file.read(length)

    return LongDocument(id=name, read=piece, start=0, end=size, place=str(path))


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
