"""The counts of terms by sorting are those of a Counter for each passage."""

from __future__ import annotations

import random
from collections import Counter

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
