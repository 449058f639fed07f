"""`search`: a query to the best passages of an index."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from bagu.errors import BaguError
from bagu.retrieve import postings, vectors
from bagu.retrieve.fuse import fuse
from bagu.retrieve.options import WEIGHTS
from bagu.retrieve.store import Passage, Store
from bagu.retrieve.words import terms

DEPTH = 100  # passages of each ranking that are joined


class Embedder(Protocol):
    """Texts to vectors. `digest` names its weights: an index refuses another one. A cosine below `floor` is no hit."""

    @property
    def digest(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def floor(self) -> float: ...
    def embed(self, texts: list[str]) -> np.ndarray: ...
    def embed_query(self, text: str) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """A passage, its score from 0 to 1, and where it stands in each ranking, from 1."""

    passage: Passage
    score: float
    ranks: Mapping[str, int]
    bm25: float = 0.0
    cosine: float | None = None
    words: Mapping[str, int] = field(default_factory=dict)  # the query's terms in it, and how many passages have each


def search(
    store: Store,
    query: str,
    k: int = 8,
    *,
    embedder: Embedder | None = None,
    weights: Mapping[str, float] = WEIGHTS,
    keep: Callable[[Passage], bool] | None = None,
) -> list[Hit]:
    """The k best passages, best first; none if no word of the query occurs and no vector is near: a score of 0 is no
    hit. The query is text and has no syntax. `keep` filters passages."""
    lexicon, dense = store.snapshot()
    with store.lock:
        scores, holders = lexicon.score(store.db, terms(query))
    depth, alive = DEPTH if keep is None else len(scores), lexicon.lengths > 0
    rankings: dict[str, np.ndarray] = {"words": scores} if weights["words"] else {}
    near = None
    if dense is not None and embedder is not None and weights["vectors"]:
        check_embedder(store, embedder)
        near = rankings["vectors"] = vectors.cosines(dense, embedder.embed_query(query), alive)
    joined, best = join(rankings, weights, depth, alive, floor=0.0 if embedder is None else embedder.floor)
    places = {name: {id: rank for rank, id in enumerate(ids, 1)} for name, ids in best.items()}
    found: list[Hit] = []
    for at in range(0, len(joined), max(k, 64)):
        some = dict(joined[at : at + max(k, 64)])
        for passage in store.passages(list(some)):
            if len(found) < k and (keep is None or keep(passage)):
                id = passage.id
                found.append(
                    Hit(
                        passage=passage,
                        score=some[id],
                        ranks={name: place[id] for name, place in places.items() if id in place},
                        bm25=float(scores[id]),
                        cosine=None if near is None else float(near[id]),
                        words={t: len(ids) for t, ids in holders.items() if _holds(ids, id)},
                    )
                )
        if len(found) >= k:
            break
    return found


def join(
    rankings: Mapping[str, np.ndarray], weights: Mapping[str, float], depth: int, alive: np.ndarray, *, floor: float
) -> tuple[list[tuple[int, float]], dict[str, list[int]]]:
    """The best `depth` passages of every ranking: joined, with their scores, and of each ranking. A word's score of 0
    and a cosine below `floor` are no hits."""
    hits = {name: np.where(x >= floor, x + 1, 0) if name == "vectors" else x for name, x in rankings.items()}
    best = {name: [id for id, _ in postings.best(x, depth)] for name, x in hits.items()}
    candidates = np.array(sorted(set().union(*best.values())), dtype=np.int64)
    return fuse(rankings, weights, candidates, alive) if len(candidates) else [], best


def check_embedder(store: Store, embedder: Embedder) -> None:
    """Raise if the vectors of the index were made by another embedder: their numbers mean something else."""
    about = store.meta("embedder")
    if about is not None and about["digest"] != embedder.digest:
        raise BaguError(
            f"the vectors of {store.path} were made by another embedder ({about['name']})",
            hint="give that one, or make a new index with this one",
        )


def _holds(ids: np.ndarray, id: int) -> bool:
    at = int(np.searchsorted(ids, id))
    return at < len(ids) and int(ids[at]) == id
