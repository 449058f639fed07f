"""`bagu bench retrieve`: an index of the standard library. Speed of indexing, of an added file and of a query, and the
rank of each documented function for the first sentence of its docstring (`docstring`).

    docstring   documents are all functions without their docstrings, queries the first sentences; files are held out,
                so that an embedder trained on the others has not seen the pairs
"""

import random
import re
import sqlite3
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bagu.bench.harness import Rows, table
from bagu.bench.options import BenchSetting, RetrieveBench
from bagu.data import StdlibSource
from bagu.data.split import held_ids
from bagu.data.stdlib import Function, documented_functions
from bagu.errors import ArgumentError
from bagu.eval.intervals import estimate
from bagu.retrieve import postings
from bagu.retrieve.core import search
from bagu.retrieve.store import Store
from bagu.retrieve.update import update
from bagu.retrieve.words import runs, terms

HELD_OUT = 0.2
QUERIES = 200  # timed


def main(given: RetrieveBench, setting: BenchSetting) -> int:
    if given.queries < 10 or given.passages < 0:
        raise ArgumentError(f"{given.queries} queries, {given.passages} passages", hint="10 and 0 or more")
    rows = Rows.of(setting, "retrieve")
    functions = list(documented_functions(StdlibSource().documents(), max_bytes=1 << 20))
    found: dict[str, Any] = {
        "system": "retrieve",
        **_speed(functions, given.passages),
        **_docstring(functions, given.queries),
    }
    rows.add([found])
    shown = {
        "index, MB of text per CPU second": f"{found['index_mb_per_s']:.1f}",
        "add one file, ms": f"{found['add_file_ms']:.1f}",
        f"query over {found['passages']:,} passages, p50 ms": f"{found['query_ms']:.1f}",
        "docstring MRR@10, words": "{mrr:.3f} [{low:.3f}, {high:.3f}]".format(**found["words"]),
    }
    if given.passages:
        shown[f"query over {given.passages:,} passages, p50 ms"] = f"{found['large_query_ms']:.1f}"
    rows.finish(table("Retrieval", ("", "value"), shown.items()))
    return 0


def _speed(functions: list[Function], large: int) -> dict[str, float]:
    """Times in CPU seconds of this process, which the load of others changes little."""
    queries = [_first(f.docstring) for f in random.Random(0).sample(functions, QUERIES)]
    source = StdlibSource()
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder, "idx")) as store:
        began = time.process_time()
        done = update(store, [path for _, path in source.files()])
        index_s = time.process_time() - began
        added = []
        for number in range(9):
            one = Path(folder, f"{number}.md")
            one.write_text(f"# Note {number}\n\nA short page.\n" * 20, encoding="utf-8")
            began = time.perf_counter()
            update(store, [one])
            added.append(time.perf_counter() - began)
        search(store, queries[0])
        times = [_seconds(store, query) for query in queries]
    return {
        "index_mb_per_s": done.characters / 1e6 / index_s, "add_file_ms": 1e3 * median(added),
        "passages": done.passages, "query_ms": 1e3 * median(times),
    } | (_large(queries, large) if large else {})  # fmt: skip


def _seconds(store: Store, query: str) -> float:
    began = time.process_time()
    search(store, query)
    return time.process_time() - began


def _large(queries: list[str], passages: int) -> dict[str, float]:
    """Queries over this many passages, made of the library's by drawing: BM25 and the best 100, without their text."""
    source = [d.text for d in StdlibSource().documents()]
    pieces = [runs(text[at : at + 800]) for text in source for at in range(0, len(text), 800)]
    rng = random.Random(0)
    db = sqlite3.connect(":memory:")
    db.executescript(postings.SCHEMA)
    for first in range(0, passages, 50_000):
        some = [rng.choice(pieces) for _ in range(min(50_000, passages - first))]
        postings.write_segment(db, first, some)
    lexicon = postings.Lexicon.load(db)
    times = []
    for query in queries[:50]:
        began = time.process_time()
        postings.best(lexicon.score(db, terms(query))[0], 100)
        times.append(time.process_time() - began)
    return {"large_passages": passages, "large_query_ms": 1e3 * median(times)}


def _docstring(functions: list[Function], count: int) -> dict[str, Any]:
    """The mean reciprocal rank of `count` held-out queries among all functions, with an interval over files."""
    held = held_ids(list(dict.fromkeys(f.file for f in functions)), fraction=HELD_OUT, seed=0)
    db = sqlite3.connect(":memory:")
    db.executescript(postings.SCHEMA)
    postings.write_segment(db, 0, [runs(f.answer) for f in functions])
    lexicon = postings.Lexicon.load(db)
    asked = [i for i, f in enumerate(functions) if f.file in held and list(terms(_first(f.docstring)))]
    asked = random.Random(0).sample(asked, min(count, len(asked)))
    gains, files = [], []
    for i in asked:
        scores, _ = lexicon.score(db, terms(_first(functions[i].docstring)))
        rank = 1 + np.count_nonzero(scores > scores[i]) + np.count_nonzero(scores[:i] == scores[i])
        gains.append(1 / rank if rank <= 10 and scores[i] > 0 else 0.0)
        files.append(functions[i].file)
    score = estimate(gains, files)
    return {
        "functions": len(functions), "queries": len(asked),
        "words": {"mrr": score.mean, "low": score.low, "high": score.high},
    }  # fmt: skip


def _first(docstring: str) -> str:
    """The first sentence."""
    return re.split(r"(?<=[.!?])\s|\n\n", docstring)[0]
