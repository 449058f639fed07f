"""The implementation of `bagu index` and `bagu search`."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from bagu.errors import ArgumentError
from bagu.retrieve.core import Embedder, Hit, search
from bagu.retrieve.options import IndexOptions, SearchOptions
from bagu.retrieve.split import Chunking
from bagu.retrieve.store import Store
from bagu.retrieve.table import TableEmbedder, is_table
from bagu.retrieve.update import Update, update

SHOWN = 240  # characters of a passage
Load = Callable[[str], Embedder]  # a model by its name; this part does not load models


def index_main(given: IndexOptions, load: Load) -> int:
    """Update the index; 1 if nothing could be read."""
    chunking = Chunking(size=given.size, overlap=given.overlap)
    with Store(given.out) as store:
        asked = {"size": chunking.size, "overlap": chunking.overlap}
        if store.meta("chunking") not in (None, asked) and store.files():
            was = store.meta("chunking")
            hint = f"add --size {was['size']} --overlap {was['overlap']}, or make a new index"
            raise ArgumentError(f"the passages of {given.out} have other sizes", hint=hint)
        with store.transaction():
            store.set_meta("chunking", asked)
        embedder = open_embedder(store, given.embedder, load)
        paths = [Path(path) for path in given.paths]
        done = update(store, paths, embedder=embedder, chunking=chunking, report=_progress)
        lexicon, _ = store.snapshot()
        files, passages = len(store.files()), lexicon.alive
    if given.as_json:
        counts = asdict(done) | {"files": files, "all_passages": passages}
        print(json.dumps(counts, ensure_ascii=False))
    else:
        _report(done, files, passages, given.out)
    return 1 if done.problems and not files else 0


def search_main(given: SearchOptions, load: Load) -> int:
    """Print the best passages; 1 if there are none."""
    if not 1 <= given.k <= 1000:
        raise ArgumentError(f"-k {given.k}", hint="1 to 1000")
    with Store(given.index, read_only=True) as store:
        hits = search(store, given.query, given.k, embedder=open_embedder(store, given.embedder, load))
        count = store.snapshot()[0].alive
    if given.as_json:
        print(json.dumps([asdict(hit) | {"place": hit.passage.place} for hit in hits], ensure_ascii=False))
    elif not hits:
        print(f"nothing found: no word of the query is in the {count:,} passages of {given.index}")
    for number, hit in enumerate([] if given.as_json else hits, 1):
        print("\n".join(_lines(number, hit, given.explain)))
    return 0 if hits else 1


def open_embedder(store: Store, given: str | None, load: Load) -> Embedder | None:
    """The embedder that is asked for, or the one that made the vectors of the index: a table, or a model by `load`."""
    about = store.meta("embedder")
    name = given or (None if about is None else about["name"])
    if name is None:
        return None
    return TableEmbedder(name) if is_table(Path(name)) else load(name)


def _progress(done: Update, paths: Sequence[str]) -> None:
    if paths:
        print(f"stored {done.added + done.changed:,} files, {done.passages:,} passages", file=sys.stderr, flush=True)


def _report(done: Update, files: int, passages: int, out: Path) -> None:
    for name, why in done.problems.items():
        print(f"left out {name}: {why}", file=sys.stderr)
    if done.other_kinds:
        shown = ", ".join(f"{ending} ({count})" for ending, count in done.other_kinds.most_common(6))
        print(f"not read, of other kinds: {shown}", file=sys.stderr)
    rate = f", {done.characters / 1e6 / done.seconds:.1f} MB/s" if done.characters > 1e6 else ""
    print(
        f"{out}: {files:,} files, {passages:,} passages; {done.added} added, {done.changed} changed, "
        f"{done.removed} removed, {done.unchanged} unchanged in {done.seconds:.1f} s{rate}"
    )


def _lines(number: int, hit: Hit, explain: bool) -> list[str]:
    passage = hit.passage
    text = " ".join(passage.text.split())
    title = f"  {passage.title}" if passage.title else ""
    found = [f"[{number}] {passage.place}  {hit.score:.2f}{title}"]
    if explain:
        ranks = ", ".join(f"{name} {rank}" for name, rank in hit.ranks.items())
        near = "" if hit.cosine is None else f", cosine {hit.cosine:.2f}"
        words = ", ".join(f"{term} (in {count:,})" for term, count in sorted(hit.words.items(), key=lambda w: w[1]))
        found += [f"    ranks: {ranks}; BM25 {hit.bm25:.2f}{near}", f"    words: {words or 'none'}"]
    return [*found, f"    {text[:SHOWN]}{'…' if len(text) > SHOWN else ''}"]
