"""Bring an index up to date with files and folders: new, changed and deleted files, in batches of one transaction each.

A file whose size and time are those of the index is not read. `report` is called after each commit with the paths that
are now in the file for good.
"""

import gc
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagu.errors import BaguError
from bagu.retrieve import postings, vectors
from bagu.retrieve.core import Embedder, check_embedder
from bagu.retrieve.read import Document, Unreadable, kind_of, read
from bagu.retrieve.split import Chunking, Span, split
from bagu.retrieve.store import File, Store
from bagu.retrieve.words import runs, word_terms

BATCH = 8 * 2**20  # characters in one transaction; their words take about 60 MB
SKIPPED = {"__pycache__", "node_modules"}  # folders; and all that begin with a dot


@dataclass(kw_only=True)
class Update:
    """What an update did."""

    added: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    passages: int = 0
    characters: int = 0
    problems: dict[str, str] = field(default_factory=dict)  # a sentence for each file that was left out
    other_kinds: Counter[str] = field(default_factory=Counter)  # endings in folders that are not read
    seconds: float = 0.0


@dataclass(frozen=True)
class Prepared:
    """A document with its spans, ready to be stored."""

    path: str
    name: str
    document: Document
    spans: Sequence[Span]
    runs: Sequence[Sequence[str]]  # of each span
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def sha(self) -> str:
        return hashlib.sha256(self.document.text.encode()).hexdigest()


def update(
    store: Store,
    paths: Iterable[Path],
    *,
    embedder: Embedder | None = None,
    chunking: Chunking | None = None,
    batch: int = BATCH,
    report: Callable[[Update, Sequence[str]], None] = lambda done, paths: None,
) -> Update:
    """Index files and folders. Files of the index that lay under one of these paths and are gone are removed."""
    began, done, known = time.monotonic(), Update(), store.files()
    use_embedder(store, embedder)
    roots = list(dict.fromkeys(paths))
    with _no_cycles():
        seen = _store_new(store, roots, known, embedder, chunking, batch, done, report)
    under = tuple(os.path.realpath(root).rstrip(os.sep) + os.sep for root in roots)
    exact = {os.path.realpath(root) for root in roots}
    gone = [
        f for p, f in known.items() if p not in seen and (p in exact or p.startswith(under)) and not Path(p).exists()
    ]
    if gone:
        with store.transaction():
            for old in gone:
                delete(store, old)
        done.removed = len(gone)
        report(done, [])
    done.seconds = time.monotonic() - began
    return done


@contextmanager
def _no_cycles() -> Iterator[None]:
    """Without the collector of cycles, which visits millions of words that are in none: a tenth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _store_new(
    store: Store,
    roots: Sequence[Path],
    known: dict[str, File],
    embedder: Embedder | None,
    chunking: Chunking | None,
    batch: int,
    done: Update,
    report: Callable[[Update, Sequence[str]], None],
) -> set[str]:
    """Store the files that are new or changed; returns the paths of all files."""
    seen: set[str] = set()
    real = _real_paths()
    waiting: list[Prepared] = []
    size = 0
    for name, file in _walk(roots, done):
        path = real(file)
        if path in seen:
            continue
        seen.add(path)
        try:
            stat = Path(path).stat()
            old = known.get(path)
            if old is not None and (old.size, old.mtime) == (stat.st_size, stat.st_mtime_ns):
                done.unchanged += 1
                continue
            waiting.append(prepare(path, name, read(Path(path)), chunking))
            size += len(waiting[-1].document.text)
        except OSError as error:
            done.problems[name] = f"it cannot be read: {error.strerror}"
        except Unreadable as error:
            done.problems[name] = str(error)
        if size >= batch:
            _commit(store, waiting, known, embedder, done, report)
            size = 0
    _commit(store, waiting, known, embedder, done, report)
    return seen


def prepare(
    path: str, name: str, document: Document, chunking: Chunking | None = None, attributes: dict[str, Any] | None = None
) -> Prepared:
    """Split a document into spans of words; a passage without any term cannot be found, and is left out."""
    spans, words = [], []
    label = runs(Path(name).stem)
    for span in split(document.text, document.kind, chunking):
        own = runs(document.text[span.start : span.end])
        if any(map(word_terms, own)):
            spans.append(span)
            words.append([*own, *runs(span.title), *label])  # a question often names the file or the heading
    return Prepared(path, name, document, spans, words, attributes or {})


def use_embedder(store: Store, embedder: Embedder | None) -> None:
    """Note the embedder of a new index; check it for one that has vectors."""
    about = store.meta("embedder")
    if embedder is None:
        if about is not None:
            raise BaguError(f"{store.path} has vectors of {about['name']}", hint=f"add --embedder {about['name']}")
        return
    check_embedder(store, embedder)
    if about is None:
        if store.files():
            raise BaguError(f"{store.path} was made without an embedder", hint="make a new index with --embedder")
        with store.transaction():
            name = getattr(embedder, "name", "an embedder")
            store.set_meta("embedder", {"digest": embedder.digest, "size": embedder.size, "name": name})


def put(store: Store, documents: Sequence[Prepared], embedder: Embedder | None = None) -> list[int]:
    """Store documents in one segment, inside a transaction; returns their ids."""
    first = store.meta("next")
    ids, at = [], first
    for one in documents:
        id = store.db.execute(
            "INSERT INTO files(path, name, size, mtime, sha, first, count, attributes) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                one.path,
                one.name,
                one.document.size,
                one.document.mtime,
                one.sha,
                at,
                len(one.spans),
                json.dumps(one.attributes),
            ),
        ).lastrowid
        assert id is not None
        text = one.document.text
        store.db.executemany(
            "INSERT INTO passages VALUES (?, ?, ?, ?, ?, ?, ?)",
            ((i, id, s.start, s.end, s.line, s.title, text[s.start : s.end]) for i, s in enumerate(one.spans, at)),
        )
        ids.append(id)
        at += len(one.spans)
    if at > first:
        postings.write_segment(store.db, first, [words for one in documents for words in one.runs])
        if embedder is not None:
            texts = [one.document.text[s.start : s.end] for one in documents for s in one.spans]
            vectors.write(store.db, first, embedder.embed(texts))
        store.set_meta("next", at)
    return ids


def delete(store: Store, file: File) -> None:
    """Remove a file, inside a transaction."""
    postings.remove(store.db, file.first, file.count)
    store.db.execute("DELETE FROM passages WHERE id >= ? AND id < ?", (file.first, file.first + file.count))
    store.db.execute("DELETE FROM files WHERE id = ?", (file.id,))


def _commit(
    store: Store,
    waiting: list[Prepared],
    known: dict[str, File],
    embedder: Embedder | None,
    done: Update,
    report: Callable[[Update, Sequence[str]], None],
) -> None:
    if not waiting:
        return
    new = []
    with store.transaction():
        for one in waiting:
            old = known.get(one.path)
            if old is not None and old.sha == one.sha:  # touched, not changed
                document = one.document
                store.db.execute(
                    "UPDATE files SET size = ?, mtime = ? WHERE id = ?", (document.size, document.mtime, old.id)
                )
                done.unchanged += 1
                continue
            if old is not None:
                delete(store, old)
            done.changed += old is not None
            done.added += old is None
            new.append(one)
        put(store, new, embedder)
    done.passages += sum(len(one.spans) for one in new)
    done.characters += sum(len(one.document.text) for one in new)
    report(done, [one.path for one in waiting])
    waiting.clear()


def _walk(roots: Sequence[Path], done: Update) -> Iterator[tuple[str, str]]:
    """(name, path) of the files, in a fixed order. Links to folders inside a folder are not followed: they may loop."""
    for root in roots:
        if not os.path.lexists(root):
            raise BaguError(f"there is no file or folder {root}", hint="check the path and the working folder")
        if not root.is_dir():
            yield str(root), str(root)
            continue
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED and not name.startswith("."))
            for name in sorted(names):
                path = str(Path(folder, name))
                if not _is_utf8(path):
                    done.problems[repr(path)] = "its name is not UTF-8: rename it"
                elif kind_of(name) is not None:
                    yield path, path
                elif not name.startswith("."):
                    done.other_kinds[Path(name).suffix or "no ending"] += 1


def _real_paths() -> Callable[[str], str]:
    """`os.path.realpath` that resolves each folder once: it asks the system for every part of a path."""
    folders: dict[str, str] = {}

    def real(path: str) -> str:
        folder, name = os.path.split(path)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        found = Path(folders[folder], name)
        return os.path.realpath(found) if found.is_symlink() else str(found)

    return real


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
