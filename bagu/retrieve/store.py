"""The index file: one SQLite database with files, passages, postings and vectors.

Every change is one transaction in WAL mode with full synchronisation: after kill -9 or a power cut the file opens as it
was after the last commit, and what was confirmed is there. One process writes at a time; readers do not wait for it.
"""

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bagu.errors import BaguError
from bagu.retrieve import postings, vectors

VERSION = 1  # of the schema
SCHEMA = f"""
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE files(
    id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL UNIQUE, name TEXT NOT NULL, size INTEGER NOT NULL,
    mtime INTEGER NOT NULL, sha TEXT NOT NULL, first INTEGER NOT NULL, count INTEGER NOT NULL, attributes TEXT NOT NULL
);
CREATE TABLE passages(
    id INTEGER PRIMARY KEY, file INTEGER NOT NULL, start INTEGER NOT NULL, stop INTEGER NOT NULL, line INTEGER NOT NULL,
    title TEXT NOT NULL, text TEXT NOT NULL
);
{postings.SCHEMA}
{vectors.SCHEMA}
"""
BUSY_S = 5.0  # how long a writer waits for another


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """A piece of a file: its text from `start` to `end`, in characters; `line` is the first one, from 1."""

    id: int
    file: str  # as it was given: docs/running.md
    path: str
    start: int
    end: int
    line: int
    title: str
    text: str
    attributes: dict[str, Any]

    @property
    def last_line(self) -> int:
        return self.line + self.text.count("\n")

    @property
    def place(self) -> str:
        return f"{self.file}#L{self.line}-L{self.last_line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A file of the index, with its passages first, first + 1, ..."""

    id: int
    path: str
    name: str
    size: int
    mtime: int
    sha: str
    first: int
    count: int
    attributes: dict[str, Any]


class Store:
    """An open index. `read_only` never creates or changes the file. Threads may share it."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self.lock = threading.RLock()
        self._snapshot: tuple[int, postings.Lexicon, np.ndarray | None] | None = None
        if path.is_dir():
            raise BaguError(f"{path} is a folder, and an index is a file", hint=f"name a file, such as {path / 'idx'}")
        if read_only and not path.exists():
            raise BaguError(f"there is no index {path}", hint=f"make it: bagu index FOLDER --out {path}")
        try:
            self.db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
            self._open(create=not read_only)
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def _open(self, *, create: bool) -> None:
        (tables,) = self.db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if create:
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.execute("PRAGMA synchronous=FULL")
        self.db.execute("PRAGMA cache_size=-65536")  # 64 MB
        if not tables and create:
            with self.transaction():
                for statement in SCHEMA.split(";"):
                    self.db.execute(statement)
                self.set_meta("schema", VERSION)
                self.set_meta("next", 0)
        try:
            found = self.meta("schema")
        except sqlite3.OperationalError:
            found = None
        if found != VERSION:
            what = "an index" if found is None else f"an index of schema {VERSION}, but of {found}"
            raise BaguError(f"{self.path} is not {what}", hint="give another --out, or delete it and index again")

    def _failure(self, error: sqlite3.Error) -> BaguError:
        if "locked" in str(error):
            return BaguError(f"another process is writing to {self.path}", hint="wait for it, and run this again")
        if "not a database" in str(error) or "malformed" in str(error):
            return BaguError(f"{self.path} is not an index: {error}", hint="give another file, or index again")
        return BaguError(f"{self.path}: {error}", hint="check the path, its permissions and the free space")

    def close(self) -> None:
        self.db.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All changes inside happen, or none. A second writer waits BUSY_S seconds, then gets one sentence."""
        with self.lock:
            try:
                self.db.execute("BEGIN IMMEDIATE")
                try:
                    yield self.db
                except BaseException:
                    self.db.execute("ROLLBACK")
                    raise
                self.db.execute("COMMIT")
                self._snapshot = None
            except sqlite3.Error as error:
                raise self._failure(error) from error

    def meta(self, key: str) -> Any:
        row = self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def set_meta(self, key: str, value: Any) -> None:
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def files(self) -> dict[str, File]:
        """The files by path."""
        with self.lock:
            rows = self.db.execute("SELECT id, path, name, size, mtime, sha, first, count, attributes FROM files")
            names = [column[0] for column in rows.description]
            found = [File(**{**dict(zip(names, row, strict=True)), "attributes": json.loads(row[-1])}) for row in rows]
        return {file.path: file for file in found}

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """The passages of these ids, in their order; one that was deleted meanwhile is left out."""
        with self.lock:
            rows = self.db.execute(
                "SELECT passages.id, name, path, start, stop, line, title, text, attributes FROM passages "
                f"JOIN files ON files.id = file WHERE passages.id IN ({','.join(map(str, map(int, ids)))})"
            ).fetchall()
        found = {
            id: Passage(
                id=id,
                file=name,
                path=path,
                start=start,
                end=stop,
                line=line,
                title=title,
                text=text,
                attributes=json.loads(attributes),
            )
            for id, name, path, start, stop, line, title, text, attributes in rows
        }
        return [found[id] for id in ids if id in found]

    def snapshot(self) -> tuple[postings.Lexicon, np.ndarray | None]:
        """What queries are scored from, loaded again when this or another process has changed the file."""
        with self.lock:
            (version,) = self.db.execute("PRAGMA data_version").fetchone()
            if self._snapshot is None or self._snapshot[0] != version:
                lexicon = postings.Lexicon.load(self.db)
                about = self.meta("embedder")
                dense = None if about is None else vectors.load(self.db, len(lexicon.lengths), about["size"])
                self._snapshot = version, lexicon, dense
            return self._snapshot[1], self._snapshot[2]
