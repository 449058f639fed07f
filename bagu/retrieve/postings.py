"""The lexical index inside the SQLite file: postings by term, in segments, and BM25 over them with numpy.

A committed batch is a segment. Its postings are one row per term: the passages' ids (uint32) and how often each has
the term (uint8). Ids count up from 0 without gaps; a deleted passage keeps its id, with length 0.
SQLite's own FTS5 holds the same, but its bm25() visits every matching row in turn: 0.37 to 0.59 s of CPU for a query
over 200,000 passages.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count

import numpy as np

from bagu.retrieve.words import word_terms

K1, B = 1.2, 0.75  # Robertson's, and Lucene's
MAX_SEGMENTS = 12
COUNT_BITS = 16  # of a number that holds term, passage and count: 47 are left for the first two
SCHEMA = """
CREATE TABLE segments(id INTEGER PRIMARY KEY, first INTEGER NOT NULL, count INTEGER NOT NULL, lengths BLOB NOT NULL);
CREATE TABLE postings(id INTEGER PRIMARY KEY, term TEXT NOT NULL, segment INTEGER NOT NULL, data BLOB NOT NULL);
CREATE UNIQUE INDEX posting ON postings(term, segment);
"""


def write_segment(db: sqlite3.Connection, first: int, passages: Sequence[Sequence[str]]) -> None:
    """Add passages with the ids first, first + 1, ..., each given as its runs of characters (words.py)."""
    n = len(passages)
    ids, terms, times, names = counted(passages)
    clipped = np.minimum(times, 255).astype(np.uint8)
    lengths = np.bincount(ids, weights=times, minlength=n).astype("<u4")
    ends = [0, *np.cumsum(np.bincount(terms, minlength=len(names))).tolist()]
    ids_data, times_data = (ids + first).astype("<u4").tobytes(), clipped.tobytes()
    segment = db.execute(
        "INSERT INTO segments(first, count, lengths) VALUES (?, ?, ?)", (first, n, lengths.tobytes())
    ).lastrowid
    places = ((name, ends[code], ends[code + 1]) for name, code in sorted(names.items()))
    db.executemany(
        "INSERT INTO postings(term, segment, data) VALUES (?, ?, ?)",
        ((name, segment, ids_data[4 * a : 4 * b] + times_data[a:b]) for name, a, b in places),
    )
    _merge(db)


def counted(passages: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, int]]:
    """How often each passage has each term: (passage, term, times) by term, then passage; and the terms' numbers.

    Runs are counted before they become terms, and both counts are sorts of one integer per pair: 2.5 times faster than
    a Counter for each passage.
    """
    runs: dict[str, int] = defaultdict(count().__next__)
    flat = np.fromiter(map(runs.__getitem__, chain.from_iterable(passages)), dtype=np.int64)
    owner = np.repeat(np.arange(len(passages)), np.fromiter(map(len, passages), np.int64, len(passages)))
    pairs, times = np.unique(owner * max(len(runs), 1) + flat, return_counts=True)
    owner, run = np.divmod(pairs, max(len(runs), 1))
    names: dict[str, int] = defaultdict(count().__next__)
    of_runs = np.fromiter(map(names.__getitem__, chain.from_iterable(map(word_terms, runs))), np.int64)
    sizes = np.fromiter(map(len, map(word_terms, runs)), np.int64, len(runs))
    each = sizes[run]  # terms of each pair
    starts = (np.cumsum(sizes) - sizes)[run]
    at = np.arange(each.sum()) + np.repeat(starts - (np.cumsum(each) - each), each)
    term = of_runs[at]
    keys = (term * len(passages) + np.repeat(owner, each)) << COUNT_BITS
    keys = np.sort(keys | np.minimum(np.repeat(times, each), 2**COUNT_BITS - 1))
    pairs = keys >> COUNT_BITS
    firsts = np.flatnonzero(np.diff(pairs, prepend=-1))
    sums = np.add.reduceat(keys & (2**COUNT_BITS - 1), firsts) if len(keys) else keys
    term, owner = np.divmod(pairs[firsts], max(len(passages), 1))
    return owner, term, sums, names


def remove(db: sqlite3.Connection, first: int, size: int) -> None:
    """Mark passages as deleted: their length becomes 0."""
    rows = db.execute(
        "SELECT id, first, count FROM segments WHERE first < ? AND first + count > ?", (first + size, first)
    ).fetchall()
    for segment, begin, held in rows:
        a, b = max(first, begin) - begin, min(first + size, begin + held) - begin
        with db.blobopen("segments", "lengths", segment) as blob:
            blob.seek(4 * a)
            blob.write(bytes(4 * (b - a)))


def _merge(db: sqlite3.Connection) -> None:
    """Keep at most MAX_SEGMENTS: join the last ones, up to one that is over twice as large as all after it together."""
    rows = db.execute("SELECT id, count FROM segments ORDER BY first").fetchall()
    if len(rows) <= MAX_SEGMENTS:
        return
    after, begin = rows[-1][1], len(rows) - 2
    for at in range(len(rows) - 2, -1, -1):
        if rows[at][1] > 2 * after:  # a large one is left alone, so that an added file costs the small ones
            break
        begin = at
        after += rows[at][1]
    old = [id for id, _ in rows[begin:]]
    marks = ",".join(map(str, old))
    found = db.execute(f"SELECT first, lengths FROM segments WHERE id IN ({marks}) ORDER BY first").fetchall()
    first, lengths = found[0][0], b"".join(row[1] for row in found)
    alive = np.frombuffer(lengths, dtype="<u4") > 0
    segment = db.execute(
        "INSERT INTO segments(first, count, lengths) VALUES (?, ?, ?)", (first, len(alive), lengths)
    ).lastrowid
    query = f"SELECT term, data FROM postings WHERE segment IN ({marks}) ORDER BY term, segment"
    joined: list[tuple[str, int | None, bytes]] = []
    blobs: list[bytes] = []
    term = None
    for name, data in chain(db.execute(query), [(None, b"")]):
        if name != term:
            if blobs and (one := _joined(blobs, first, alive)):
                joined.append((str(term), segment, one))
            term, blobs = name, []
        blobs.append(data)
    db.execute(f"DELETE FROM postings WHERE segment IN ({marks})")
    db.execute(f"DELETE FROM segments WHERE id IN ({marks})")
    db.executemany("INSERT INTO postings(term, segment, data) VALUES (?, ?, ?)", joined)


def _joined(blobs: Iterable[bytes], first: int, alive: np.ndarray) -> bytes:
    """One blob of several, without the deleted passages."""
    ids, times = _arrays(blobs)
    kept = alive[ids - first]
    return bytes(ids[kept].astype("<u4").tobytes() + times[kept].tobytes())


def _arrays(blobs: Iterable[bytes]) -> tuple[np.ndarray, np.ndarray]:
    parts = [(np.frombuffer(b, "<u4", len(b) // 5), np.frombuffer(b, np.uint8, offset=len(b) // 5 * 4)) for b in blobs]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return np.zeros(0, dtype="<u4"), np.zeros(0, dtype=np.uint8)
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([times for _, times in parts])


@dataclass(frozen=True)
class Lexicon:
    """A snapshot of the lengths of all passages, from which queries are scored."""

    lengths: np.ndarray  # uint32, 0 for a deleted passage
    norms: np.ndarray  # k1 (1 - b + b length / mean length), fp32
    alive: int

    @classmethod
    def load(cls, db: sqlite3.Connection) -> "Lexicon":
        blobs = [row[0] for row in db.execute("SELECT lengths FROM segments ORDER BY first")]
        lengths = np.frombuffer(b"".join(blobs), dtype="<u4")
        alive = int(np.count_nonzero(lengths))
        mean = float(lengths.sum(dtype=np.int64)) / alive if alive else 1.0
        return cls(lengths, (K1 * (1 - B + B * lengths / mean)).astype(np.float32), alive)

    def score(self, db: sqlite3.Connection, query: Iterable[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """BM25 of every passage, and the passages that have each term. A term that comes twice counts twice."""
        times: dict[str, int] = defaultdict(int)
        for term in query:
            times[term] += 1
        scores = np.zeros(len(self.lengths), dtype=np.float32)
        holders = {}
        for term, weight in times.items():
            rows = db.execute("SELECT data FROM postings WHERE term = ? ORDER BY segment", (term,))
            ids, counts = _arrays([row[0] for row in rows])
            if self.alive < len(self.lengths):
                kept = self.lengths[ids] > 0
                ids, counts = ids[kept], counts[kept]
            holders[term] = ids
            if len(ids):
                frequency = counts.astype(np.float32)
                scores[ids] += weight * self.idf(len(ids)) * frequency * (K1 + 1) / (frequency + self.norms[ids])
        return scores, holders

    def idf(self, holders: int) -> float:
        """Lucene's, which is never negative."""
        return float(np.log1p((self.alive - holders + 0.5) / (holders + 0.5)))


def best(scores: np.ndarray, k: int) -> list[tuple[int, float]]:
    """The k best ids with a score above 0, best first; the lower id first of two that are equal."""
    (found,) = np.nonzero(scores > 0)
    if len(found) > 4 * k:  # a threshold that keeps all ties of the k-th
        found = found[scores[found] >= np.partition(scores[found], -k)[-k]]
    order = found[np.lexsort((found, -scores[found]))][:k]
    return [(int(id), float(scores[id])) for id in order]
