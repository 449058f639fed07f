"""`bagu bench retrieve`: an index of the standard library. Speed of indexing, of an added file and of a query, and the
rank of each documented function for the first sentence of its docstring (`docstring`).

    docstring   documents are all functions without their docstrings, queries the first sentences; files are held out,
                so that an embedder trained on the others has not seen the pairs; `--hybrid` trains one
"""

import random
import sqlite3
import tempfile
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from bagu.bench.harness import Rows, table
from bagu.bench.options import BenchSetting, RetrieveBench
from bagu.data import StdlibSource
from bagu.data.docstrings import docstring_pairs, first_sentence, installed_folders
from bagu.data.split import held_ids
from bagu.data.stdlib import Function, documented_functions
from bagu.errors import ArgumentError
from bagu.eval.intervals import estimate
from bagu.recipes.token_table import TableConfig, train_table
from bagu.retrieve import postings, vectors
from bagu.retrieve.core import DEPTH, join, search
from bagu.retrieve.fuse import fuse
from bagu.retrieve.options import WEIGHTS
from bagu.retrieve.store import Store
from bagu.retrieve.table import TableEmbedder, save
from bagu.retrieve.update import Update, update
from bagu.retrieve.words import runs, terms

HELD_OUT = 0.2
QUERIES = 200  # timed
VECTOR = 256  # numbers


def main(given: RetrieveBench, setting: BenchSetting) -> int:
    if given.queries < 10 or given.passages < 0:
        raise ArgumentError(f"{given.queries} queries, {given.passages} passages", hint="10 and 0 or more")
    rows = Rows.of(setting, "retrieve")
    functions = list(documented_functions(StdlibSource().documents(), max_bytes=1 << 20))
    found: dict[str, Any] = {
        "system": "retrieve",
        **_speed(functions, given.passages),
        **_docstring(functions, given.queries, hybrid=given.hybrid),
    }
    rows.add([found])
    shown = {
        "index, MB of text per CPU second": f"{found['index_mb_per_s']:.1f}",
        "… per second": f"{found['index_mb_per_wall_s']:.1f}",
        "add one file, ms": f"{found['add_file_ms']:.1f}, {found['add_file_worst_ms']:.1f} at worst",
        f"query over {found['passages']:,} passages, p50 ms": f"{found['query_wall_ms']:.1f}",
        "docstring MRR@10, words": "{mrr:.3f} [{low:.3f}, {high:.3f}]".format(**found["words"]),
    }
    if given.hybrid:
        for name in ("vectors", "by_rank", "hybrid", "hybrid_minus_words"):
            shown[f"docstring MRR@10, {name.replace('_', ' ')}"] = "{mrr:.3f} [{low:.3f}, {high:.3f}]".format(
                **found[name]
            )
        shown["training of the table, CPU s"] = f"{found['train_cpu_s']:.0f} for {found['pairs']:,} pairs"
    if given.passages:
        of = f"query over {given.passages:,} passages, p50 ms"
        shown[f"{of}, words"] = f"{found['large_query_wall_ms']:.1f}"
        shown[f"{of}, words and vectors"] = f"{found['large_hybrid_query_wall_ms']:.1f}"
    rows.finish(table("Retrieval", ("", "value"), shown.items()))
    return 0


def _speed(functions: list[Function], large: int) -> dict[str, float]:
    """Times in CPU seconds of this process, which the load of others changes little, and wall times beside them."""
    queries = [first_sentence(f.docstring) for f in random.Random(0).sample(functions, QUERIES)]
    source = StdlibSource()
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder, "idx")) as store:
        done: list[Update] = []
        index = _seconds(lambda: done.append(update(store, [path for _, path in source.files()])))
        added = []
        for number in range(30):
            one = Path(folder, f"{number}.md")
            one.write_text(f"# Note {number}\n\nA short page.\n" * 20, encoding="utf-8")
            added.append(_seconds(partial(update, store, [one])).wall)
        search(store, queries[0])
        times = [_seconds(partial(search, store, query)) for query in queries]
    return {
        "index_mb_per_s": done[0].characters / 1e6 / index.cpu,
        "index_mb_per_wall_s": done[0].characters / 1e6 / index.wall,
        "add_file_ms": 1e3 * median(added),
        "add_file_worst_ms": 1e3 * max(added),
        "passages": done[0].passages,
        "query_ms": 1e3 * median(t.cpu for t in times),
        "query_wall_ms": 1e3 * median(t.wall for t in times),
    } | (_large(queries, large) if large else {})


class Seconds(NamedTuple):
    cpu: float
    wall: float


def _seconds(call: Callable[[], object]) -> Seconds:
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


def _large(queries: list[str], passages: int) -> dict[str, float]:
    """Queries over this many passages, made of the library's by drawing: the best 100 by words, by random vectors of
    256 numbers, and joined, without their text."""
    source = [d.text for d in StdlibSource().documents()]
    pieces = [runs(text[at : at + 800]) for text in source for at in range(0, len(text), 800)]
    rng = random.Random(0)
    db = sqlite3.connect(":memory:")
    db.executescript(postings.SCHEMA)
    for first in range(0, passages, 50_000):
        some = [rng.choice(pieces) for _ in range(min(50_000, passages - first))]
        postings.write_segment(db, first, some)
    lexicon = postings.Lexicon.load(db)
    alive = lexicon.lengths > 0
    draw = np.random.default_rng(0)
    dense = vectors.normalized(draw.standard_normal((passages, VECTOR), dtype=np.float32))

    def ask(query: str, weights: Mapping[str, float]) -> None:
        rankings = {"words": lexicon.score(db, terms(query))[0]}
        if weights["vectors"]:
            rankings["vectors"] = vectors.cosines(dense, draw.standard_normal(VECTOR, dtype=np.float32), alive)
        join(rankings, weights, DEPTH, alive, floor=0.0)

    found: dict[str, float] = {"large_passages": passages}
    for name, weights in (("large_query", {**WEIGHTS, "vectors": 0.0}), ("large_hybrid_query", WEIGHTS)):
        times = [_seconds(partial(ask, query, weights)) for query in queries[:50]]
        found |= {
            f"{name}_ms": 1e3 * median(t.cpu for t in times),
            f"{name}_wall_ms": 1e3 * median(t.wall for t in times),
        }
    return found


@dataclass(frozen=True, kw_only=True)
class Gains:
    """1 / rank of each query by each ranking, and the query's file."""

    gains: dict[str, list[float]]
    files: list[str]
    pairs: int = 0
    steps: int = 0
    parameters: int = 0
    train_cpu_s: float = 0.0


def docstring_gains(
    functions: list[Function],
    count: int,
    *,
    hybrid: bool,
    installed: bool = True,
    steps: int | None = None,
    seed: int = 0,
) -> Gains:
    """The reciprocal ranks of `count` held-out queries among all functions. `hybrid` trains a table, by `seed`, on the
    other files and, with `installed`, on the packages."""
    held = held_ids(list(dict.fromkeys(f.file for f in functions)), fraction=HELD_OUT, seed=0)
    db = sqlite3.connect(":memory:")
    db.executescript(postings.SCHEMA)
    postings.write_segment(db, 0, [runs(f.answer) for f in functions])
    lexicon = postings.Lexicon.load(db)
    asked = [i for i, f in enumerate(functions) if f.file in held and list(terms(first_sentence(f.docstring)))]
    asked = random.Random(0).sample(asked, min(count, len(asked)))
    found = Gains(gains={"words": []}, files=[functions[i].file for i in asked])
    table = None
    if hybrid:
        began = time.process_time()
        pairs = _training_pairs(functions, held, installed=installed)
        config = TableConfig(seed=seed) if steps is None else TableConfig(seed=seed, steps=steps)
        table = _table(*train_table(pairs, config))
        dense = vectors.normalized(table.embed([f.answer for f in functions]))
        gains: dict[str, list[float]] = {"words": [], "vectors": [], "by_rank": [], "hybrid": []}
        size = table.passages.size + table.queries.size
        seconds = time.process_time() - began
        found = replace(found, gains=gains, pairs=len(pairs), steps=config.steps, parameters=size, train_cpu_s=seconds)
    everyone, alive = np.arange(len(functions)), np.ones(len(functions), dtype=bool)
    for i in asked:
        query = first_sentence(functions[i].docstring)
        scores, _ = lexicon.score(db, terms(query))
        found.gains["words"].append(_gain(scores, i))
        if table is not None:
            near = vectors.cosines(dense, table.embed_query(query), alive)
            order = [id for id, _ in fuse({"words": scores, "vectors": near}, WEIGHTS, everyone, alive)[:10]]
            by_rank = sum(1 / (60 + np.argsort(np.argsort(-ranking, kind="stable"))) for ranking in (scores, near))
            found.gains["vectors"].append(_gain(near, i))
            found.gains["by_rank"].append(_gain(np.asarray(by_rank), i))
            found.gains["hybrid"].append(1 / (1 + order.index(i)) if i in order else 0.0)
    return found


def _docstring(functions: list[Function], count: int, *, hybrid: bool) -> dict[str, Any]:
    """The mean reciprocal rank by each ranking, with an interval over files."""
    found = docstring_gains(functions, count, hybrid=hybrid)
    about: dict[str, Any] = {"functions": len(functions), "queries": len(found.files)}
    values = dict(found.gains)
    if hybrid:
        about |= {"pairs": found.pairs, "train_cpu_s": found.train_cpu_s}
        values["hybrid_minus_words"] = [a - b for a, b in zip(values["hybrid"], values["words"], strict=True)]
    for name, gains in values.items():
        score = estimate(gains, found.files)
        about[name] = {"mrr": score.mean, "low": score.low, "high": score.high}
    return about


def _table(words: list[str], passages: np.ndarray, queries: np.ndarray) -> TableEmbedder:
    """As it is read from a file: fp16."""
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), words, passages, queries)
        return TableEmbedder(folder)


def _gain(scores: np.ndarray, i: int) -> float:
    """1 / rank of document i, 0 past the tenth."""
    rank = 1 + np.count_nonzero(scores > scores[i]) + np.count_nonzero(scores[:i] == scores[i])
    return 1 / rank if rank <= 10 and scores[i] > 0 else 0.0


def _training_pairs(functions: list[Function], held: Container[str], *, installed: bool) -> list[tuple[str, str]]:
    """Pairs of the library's other files and of the installed packages, without any that has the first sentence or the
    code of a held-out function: packages copy parts of the library."""
    tested = [f for f in functions if f.file in held]
    sentences = {first_sentence(f.docstring).strip().lower() for f in tested}
    codes = {"".join(f.answer.split()) for f in tested}
    own = [(first_sentence(f.docstring), f.answer) for f in functions if f.file not in held]
    folders = installed_folders() if installed else []
    other = [(pair.query, pair.passage) for pair in docstring_pairs(folders)]
    return [(q, p) for q, p in own + other if q.strip().lower() not in sentences and "".join(p.split()) not in codes]
