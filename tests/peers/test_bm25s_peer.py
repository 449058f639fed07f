"""bm25s ranks the same terms as bagu's index: Kendall's tau of the scores of all passages that both find."""

from __future__ import annotations

import sqlite3
from itertools import combinations

import numpy as np
import pytest

from bagu.data.stdlib import StdlibSource
from bagu.retrieve import postings
from bagu.retrieve.split import split
from bagu.retrieve.words import runs, terms

bm25s = pytest.importorskip("bm25s")
QUERIES = ("open a file and read its lines", "parse an integer", "send a request to the host", "raise an error")


def kendall(a: np.ndarray, b: np.ndarray) -> float:
    signs = [np.sign(a[i] - a[j]) * np.sign(b[i] - b[j]) for i, j in combinations(range(len(a)), 2)]
    return float(np.sum(signs) / max(np.count_nonzero(signs), 1))


def test_the_ranking_is_that_of_bm25s() -> None:
    documents = [d for _, d in zip(range(60), StdlibSource().documents(), strict=False)]
    passages = [list(terms(d.text[s.start : s.end])) for d in documents for s in split(d.text, "python")]
    db = sqlite3.connect(":memory:")
    db.executescript(postings.SCHEMA)
    postings.write_segment(db, 0, [runs(d.text[s.start : s.end]) for d in documents for s in split(d.text, "python")])
    lexicon = postings.Lexicon.load(db)
    judge = bm25s.BM25(k1=postings.K1, b=postings.B, method="lucene")
    judge.index(passages, show_progress=False)
    for query in QUERIES:
        ours, _ = lexicon.score(db, terms(query))
        theirs = judge.get_scores(list(terms(query)))
        best = np.argsort(-theirs)[:200]
        assert kendall(ours[best], theirs[best]) >= 0.99
