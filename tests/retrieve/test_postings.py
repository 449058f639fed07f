"""The counts of terms by sorting are those of a Counter for each passage."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter

import numpy as np

from bagu.retrieve import postings
from bagu.retrieve.postings import counted
from bagu.retrieve.words import runs, terms


def test_counts_are_those_of_a_counter() -> None:
    rng = random.Random(0)
    words = ["readFile", "read_file", "file", "files", "__", "故乡的云", "a", "A2b", "naïve", "reading", "x" * 300]
    texts = [" ".join(rng.choices(words, k=rng.choice((0, 1, 40)))) for _ in range(60)]
    ids, codes, times, names = counted([runs(text) for text in texts])
    by_code = {code: name for name, code in names.items()}
    found: list[Counter[str]] = [Counter() for _ in texts]
    for id, code, count in zip(ids.tolist(), codes.tolist(), times.tolist(), strict=True):
        found[id][by_code[code]] = count
    assert found == [Counter(terms(text)) for text in texts]
    assert sorted(zip(codes.tolist(), ids.tolist(), strict=True)) == list(
        zip(codes.tolist(), ids.tolist(), strict=True)
    )


def test_no_passages_and_no_words() -> None:
    assert all(len(part) == 0 for part in counted([[], []]))


def test_an_added_file_does_not_rewrite_the_large_segments() -> None:
    db = sqlite3.connect(":memory:")
    db.executescript(postings.SCHEMA)
    at = 0
    for size in (*[400] * 4, *[1] * 40):
        postings.write_segment(db, at, [["word"]] * size)
        at += size
    sizes = [row[0] for row in db.execute("SELECT count FROM segments ORDER BY first")]
    assert sizes[:4] == [400] * 4 and sum(sizes) == at and len(sizes) <= postings.MAX_SEGMENTS
    (data,) = zip(*db.execute("SELECT data FROM postings WHERE term = 'word' ORDER BY segment"), strict=True)
    ids = [int(id) for blob in data for id in np.frombuffer(blob, "<u4", len(blob) // 5)]
    assert sorted(ids) == list(range(at))
