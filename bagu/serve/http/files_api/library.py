"""Uploaded files and vector stores, each of an API key; and the indexes of the server, which every key may search.

One SQLite file holds the files and which of them each store has; a store's passages are an index of `bagu.retrieve`.
Methods block, so the routes call them in threads.
"""

import json
import re
import secrets
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagu.errors import BaguError
from bagu.retrieve.core import Hit, search
from bagu.retrieve.options import WEIGHTS
from bagu.retrieve.read import MAX_BYTES, Document, Unreadable, extract, kind_of
from bagu.retrieve.split import Chunking
from bagu.retrieve.store import File, Passage, Store
from bagu.retrieve.table import TableEmbedder, is_table
from bagu.retrieve.update import delete, prepare, put
from bagu.serve.http.errors import ApiError

MAX_TOTAL = 2**30  # bytes of files per API key
MAX_FILES = 10_000  # per API key, and per store OpenAI's limit
MAX_STORES = 100  # per API key
MAX_OPEN = 16  # indexes of stores that stay open: each caches up to 64 MB
QUERY_LENGTH = 4096  # characters of a query that are searched for, its last ones
SCHEMA = """
CREATE TABLE IF NOT EXISTS files(id TEXT PRIMARY KEY, owner TEXT, filename TEXT, purpose TEXT, created_at INTEGER,
    bytes INTEGER, data BLOB);
CREATE TABLE IF NOT EXISTS stores(id TEXT PRIMARY KEY, owner TEXT, name TEXT, created_at INTEGER,
    last_active_at INTEGER, metadata TEXT);
CREATE TABLE IF NOT EXISTS members(store TEXT, file TEXT, created_at INTEGER, status TEXT, last_error TEXT,
    attributes TEXT, size INTEGER, overlap INTEGER, usage_bytes INTEGER, PRIMARY KEY (store, file));
UPDATE members SET status = 'failed', last_error =
    '{"code": "server_error", "message": "the server was stopped meanwhile: add the file again"}'
    WHERE status = 'in_progress';
"""
COUNTS = """SELECT stores.*, count(file) AS total, coalesce(sum(status = 'completed'), 0) AS completed,
    coalesce(sum(status = 'failed'), 0) AS failed, coalesce(sum(usage_bytes), 0) AS usage_bytes
    FROM stores LEFT JOIN members ON store = id WHERE owner = ?"""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A hit in a store."""

    store: str
    file_id: str
    hit: Hit


class Library:
    """`folder` keeps the files over a restart; None is a folder that is deleted at the end. `indexes` by name."""

    def __init__(self, folder: Path | None = None, indexes: Mapping[str, Path] | None = None) -> None:
        self._temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="bagu-files-")) if folder is None else folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._open: dict[str, Store] = {}  # least recently used first
        self._uses: dict[str, int] = {}
        self._db = sqlite3.connect(self.folder / "files.sqlite", check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        try:
            self._db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; {SCHEMA}")
        except sqlite3.Error as error:
            raise BaguError(f"{self.folder}: {error}", hint="give --files another folder") from error
        self.indexes: dict[str, Store] = {}
        self._embedders: dict[str, TableEmbedder] = {}
        for name, path in (indexes or {}).items():
            if not re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII):
                raise BaguError(f"--index {name}={path}", hint="a name has letters, digits, _, . and -")
            id = f"vs_{name}"
            self.indexes[id] = store = Store(path, read_only=True)
            if (about := store.meta("embedder")) is not None and is_table(Path(about["name"])):
                self._embedders[id] = TableEmbedder(about["name"])
            elif about is not None:  # a model would need torch in this process
                print(f"bagu serve: {path} is searched by words: its embedder {about['name']} is not a table")

    def close(self) -> None:
        for store in (*self._open.values(), *self.indexes.values()):
            store.close()
        self._db.close()
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    # files

    def add_file(self, owner: str, filename: str, purpose: str, data: bytes) -> dict[str, Any]:
        if len(data) > MAX_BYTES:
            raise ApiError(413, f"the file has {len(data)} bytes", param="file", hint=f"at most {MAX_BYTES}: divide it")
        with self._lock:
            count, total = self._db.execute(
                "SELECT count(*), coalesce(sum(bytes), 0) FROM files WHERE owner = ?", (owner,)
            ).fetchone()
            if count >= MAX_FILES or total + len(data) > MAX_TOTAL:
                hint = f"at most {MAX_FILES} files and {MAX_TOTAL} bytes: delete some"
                raise ApiError(413, f"this API key has {count} files of {total} bytes", code="storage_full", hint=hint)
            id = f"file-{secrets.token_hex(12)}"
            row = (id, owner, filename, purpose, int(time.time()), len(data), data)
            self._db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        return self.file(owner, id)

    def file(self, owner: str, id: str) -> dict[str, Any]:
        return _file(self._row("SELECT * FROM files WHERE owner = ? AND id = ?", owner, id, what=f"file {id!r:.80}"))

    def files(self, owner: str) -> list[dict[str, Any]]:
        query = "SELECT id, filename, purpose, created_at, bytes FROM files WHERE owner = ? ORDER BY rowid"
        return [_file(row) for row in self._rows(query, owner)]

    def content(self, owner: str, id: str) -> tuple[str, bytes]:
        """The name and the bytes of a file."""
        row = self._row("SELECT * FROM files WHERE owner = ? AND id = ?", owner, id, what=f"file {id!r:.80}")
        return row["filename"], row["data"]

    def delete_file(self, owner: str, id: str) -> None:
        """Delete a file, and its passages in every store."""
        self.file(owner, id)
        for row in self._rows("SELECT store FROM members WHERE file = ?", id):
            self.remove(owner, row["store"], id)
        with self._lock:
            self._db.execute("DELETE FROM files WHERE owner = ? AND id = ?", (owner, id))

    # stores

    def create(self, owner: str, name: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        with self._lock:
            if len(self._rows("SELECT id FROM stores WHERE owner = ?", owner)) >= MAX_STORES:
                hint = "delete one"
                raise ApiError(400, f"this API key has {MAX_STORES} vector stores", code="storage_full", hint=hint)
            id, now = f"vs_{secrets.token_hex(12)}", int(time.time())
            row = (id, owner, name, now, now, json.dumps(dict(metadata)))
            self._db.execute("INSERT INTO stores VALUES (?, ?, ?, ?, ?, ?)", row)
        return self.store(owner, id)

    def store(self, owner: str, id: str) -> dict[str, Any]:
        if id in self.indexes:
            return self._index(id)
        return _store(self._row(f"{COUNTS} AND id = ? GROUP BY id", owner, id, what=f"vector store {id!r:.80}"))

    def stores(self, owner: str) -> list[dict[str, Any]]:
        own = self._rows(f"{COUNTS} GROUP BY id ORDER BY stores.rowid", owner)
        return [*map(self._index, self.indexes), *map(_store, own)]

    def change(self, owner: str, id: str, name: str | None, metadata: Mapping[str, str] | None) -> dict[str, Any]:
        self._check_own(owner, id)
        with self._lock:
            if name is not None:
                self._db.execute("UPDATE stores SET name = ? WHERE id = ?", (name, id))
            if metadata is not None:
                self._db.execute("UPDATE stores SET metadata = ? WHERE id = ?", (json.dumps(dict(metadata)), id))
        return self.store(owner, id)

    def delete(self, owner: str, id: str) -> None:
        self._check_own(owner, id)
        with self._lock:
            self._db.execute("DELETE FROM stores WHERE id = ?", (id,))
            self._db.execute("DELETE FROM members WHERE store = ?", (id,))
            for ending in ("", "-wal", "-shm"):
                (self.folder / f"{id}.idx{ending}").unlink(missing_ok=True)  # a search that runs keeps its open file
            if not self._uses.get(id) and id in self._open:
                self._open.pop(id).close()

    # files of a store

    def add(self, owner: str, id: str, file: str, attributes: Mapping[str, Any], chunking: Chunking) -> dict[str, Any]:
        """Index a file for a store; one that cannot be read gets the status "failed" and the reason."""
        self._check_own(owner, id)
        filename, data = self.content(owner, file)
        sizes = (json.dumps(dict(attributes)), chunking.size, chunking.overlap)
        with self._lock:
            row = (id, file, int(time.time()), "in_progress", None, *sizes, 0)
            self._db.execute("INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        try:
            kind = kind_of(filename) or "text"
            document = Document(extract(data, kind), kind, len(data), 0)
            ready = prepare(file, filename, document, chunking, dict(attributes))
            with self._opened(id) as store, store.transaction():
                if (old := store.files().get(file)) is not None:
                    delete(store, old)
                put(store, [ready])
            failure, used = None, sum(s.end - s.start for s in ready.spans)
        except Unreadable as error:
            failure, used = json.dumps({"code": "unsupported_file", "message": str(error)}), 0
        with self._lock:
            self._db.execute(
                "UPDATE members SET status = ?, last_error = ?, usage_bytes = ? WHERE store = ? AND file = ?",
                ("completed" if failure is None else "failed", failure, used, id, file),
            )
        return self.member(owner, id, file)

    def member(self, owner: str, id: str, file: str) -> dict[str, Any]:
        found = [m for m in self.members(owner, id) if m["id"] == file]
        if not found:
            raise _missing(f"file {file!r:.80} in the vector store {id!r:.80}")
        return found[0]

    def members(self, owner: str, id: str) -> list[dict[str, Any]]:
        if id in self.indexes:
            return [_indexed(id, file) for file in self.indexes[id].files().values()]
        self.store(owner, id)
        return [_member(row) for row in self._rows("SELECT * FROM members WHERE store = ? ORDER BY rowid", id)]

    def remove(self, owner: str, id: str, file: str) -> None:
        self._check_own(owner, id)
        self.member(owner, id, file)
        with self._opened(id) as store, store.transaction():
            if (old := store.files().get(file)) is not None:
                delete(store, old)
        with self._lock:
            self._db.execute("DELETE FROM members WHERE store = ? AND file = ?", (id, file))

    def passages(self, owner: str, id: str, file: str) -> tuple[dict[str, Any], list[Passage]]:
        """A file of a store, and its passages in order."""
        about = self.member(owner, id, file)
        with self._opened(id) as store:
            one = next((f for f in store.files().values() if _file_id(id, f, self.indexes) == file), None)
            return about, [] if one is None else store.passages(range(one.first, one.first + one.count))

    def search(
        self,
        owner: str,
        ids: Sequence[str],
        query: str,
        k: int,
        *,
        keep: Callable[[Mapping[str, Any]], bool] | None,
        threshold: float = 0.0,
        weights: Mapping[str, float] = WEIGHTS,
    ) -> list[Found]:
        """The best k passages of these stores together."""
        found = []
        for id in dict.fromkeys(ids):
            self.store(owner, id)
            own = None if keep is None else lambda passage: keep(passage.attributes)
            with self._opened(id) as store:
                hits = search(
                    store, query[-QUERY_LENGTH:], k, keep=own, weights=weights, embedder=self._embedders.get(id)
                )
                files = store.files() if id in self.indexes and hits else {}
            for hit in hits:
                file = f"file-{id}-{files[hit.passage.path].id}" if id in self.indexes else hit.passage.path
                found.append(Found(store=id, file_id=file, hit=hit))
            with self._lock:
                self._db.execute("UPDATE stores SET last_active_at = ? WHERE id = ?", (int(time.time()), id))
        found.sort(key=lambda one: -one.hit.score)
        return [one for one in found if one.hit.score >= threshold][:k]

    @contextmanager
    def _opened(self, id: str) -> Iterator[Store]:
        """The index of a store. It stays open for the next use."""
        if id in self.indexes:
            yield self.indexes[id]
            return
        with self._lock:
            store = self._open.pop(id) if id in self._open else Store(self.folder / f"{id}.idx")
            self._open[id] = store
            self._uses[id] = self._uses.get(id, 0) + 1
        try:
            yield store
        finally:
            with self._lock:
                self._uses[id] -= 1
                gone = not self._rows("SELECT id FROM stores WHERE id = ?", id)
                idle = [one for one in self._open if not self._uses[one]]
                for one in idle[: max(0, len(self._open) - MAX_OPEN)] + ([id] if gone and not self._uses[id] else []):
                    if one in self._open:
                        self._open.pop(one).close()

    def _check_own(self, owner: str, id: str) -> None:
        """Raise if this owner may not change the store."""
        self.store(owner, id)
        if id in self.indexes:
            raise ApiError(403, f"{id} is an index of the server", hint="change it with `bagu index`")

    def _index(self, id: str) -> dict[str, Any]:
        files = self.indexes[id].files().values()
        return _store_object(id, id.removeprefix("vs_"), sum(f.size for f in files), len(files), 0, 0, 0, {})

    def _rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def _row(self, query: str, *values: Any, what: str) -> sqlite3.Row:
        found = self._rows(query, *values)
        if not found:
            raise _missing(what)
        return found[0]


def _missing(what: str) -> ApiError:
    return ApiError(404, f"there is no {what}", code="not_found")


def _file_id(store: str, file: File, indexes: Mapping[str, Store]) -> str:
    return f"file-{store}-{file.id}" if store in indexes else file.path


def _file(row: sqlite3.Row) -> dict[str, Any]:
    about = {name: row[name] for name in ("id", "bytes", "created_at", "filename", "purpose")}
    return {**about, "object": "file", "status": "processed"}


def _store(row: sqlite3.Row) -> dict[str, Any]:
    return _store_object(
        row["id"],
        row["name"],
        row["usage_bytes"],
        row["completed"],
        row["failed"],
        row["created_at"],
        row["last_active_at"],
        json.loads(row["metadata"]),
        row["total"] - row["completed"] - row["failed"],
    )


def _store_object(
    id: str,
    name: str,
    used: int,
    completed: int,
    failed: int,
    created: int,
    active: int,
    metadata: dict[str, str],
    in_progress: int = 0,
) -> dict[str, Any]:
    total = completed + failed + in_progress
    counts = {"in_progress": in_progress, "completed": completed, "failed": failed, "cancelled": 0, "total": total}
    return {
        "id": id,
        "object": "vector_store",
        "created_at": created,
        "name": name,
        "usage_bytes": used,
        "file_counts": counts,
        "status": "in_progress" if in_progress else "completed",
        "last_active_at": active,
        "metadata": metadata,
    }


def _member(row: sqlite3.Row) -> dict[str, Any]:
    sizes = {"max_chunk_size_tokens": row["size"], "chunk_overlap_tokens": row["overlap"]}
    return {
        "id": row["file"],
        "object": "vector_store.file",
        "created_at": row["created_at"],
        "status": row["status"],
        "vector_store_id": row["store"],
        "last_error": json.loads(row["last_error"] or "null"),
        "usage_bytes": row["usage_bytes"],
        "attributes": json.loads(row["attributes"]),
        "chunking_strategy": {"type": "static", "static": sizes},
    }


def _indexed(id: str, file: File) -> dict[str, Any]:
    return {
        "id": f"file-{id}-{file.id}",
        "object": "vector_store.file",
        "created_at": file.mtime // 10**9,
        "status": "completed",
        "vector_store_id": id,
        "last_error": None,
        "usage_bytes": file.size,
        "attributes": file.attributes,
        "chunking_strategy": {"type": "other"},
    }
