"""Vectors of the passages: fp16 in the file, fp32 in memory, and the exact best k by blocks.

Exact search over a million vectors of 256 numbers reads 1 GB: about 0.1 s on two cores. numpy converts fp16 at a fifth
of that speed, so the conversion is done once, when the vectors are loaded.
"""

import sqlite3
from collections.abc import Iterator

import numpy as np

SCHEMA = "CREATE TABLE vectors(first INTEGER PRIMARY KEY, data BLOB NOT NULL);"
BLOCK = 1 << 16


def write(db: sqlite3.Connection, first: int, vectors: np.ndarray) -> None:
    """Add the vectors [n, d] of the passages first, first + 1, ...; a vector of length 0 stays 0, and is no hit."""
    db.execute("INSERT INTO vectors(first, data) VALUES (?, ?)", (first, normalized(vectors).astype("<f2").tobytes()))


def normalized(vectors: np.ndarray) -> np.ndarray:
    vectors = np.asarray(vectors, dtype=np.float32)
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1.0)


def load(db: sqlite3.Connection, count: int, size: int) -> np.ndarray:
    """All vectors as fp32 [count, size]."""
    found = np.zeros((count, size), dtype=np.float32)
    for first, data in db.execute("SELECT first, data FROM vectors ORDER BY first"):
        rows = np.frombuffer(data, dtype="<f2").reshape(-1, size)
        found[first : first + len(rows)] = rows
    return found


def blocks(vectors: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    yield from ((at, vectors[at : at + BLOCK]) for at in range(0, len(vectors), BLOCK))


def cosines(vectors: np.ndarray, query: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """The cosine of every passage with the query; -1 for a deleted one."""
    query = normalized(query)
    found = np.empty(len(vectors), dtype=np.float32)
    for at, block in blocks(vectors):
        np.dot(block, query, out=found[at : at + len(block)])
    found[~alive] = -1.0
    return found
