"""Join rankings by rank: rank r of a ranking gives weight / (60 + r) (reciprocal rank fusion, Cormack 2009).

Scores of BM25 and cosines have no common unit, ranks do. The sum is divided by the most that it can be, so that a
passage that is first everywhere has 1.
"""

from collections.abc import Mapping, Sequence

CONSTANT = 60  # the paper's
WEIGHTS: Mapping[str, float] = {"words": 1.0, "vectors": 1.0}


def fuse(rankings: Mapping[str, Sequence[int]], weights: Mapping[str, float]) -> list[tuple[int, float]]:
    """(id, score from 0 to 1), best first; of two that are equal the lower id is first."""
    found: dict[int, float] = {}
    for name, ids in rankings.items():
        for rank, id in enumerate(ids, 1):
            found[id] = found.get(id, 0.0) + weights[name] / (CONSTANT + rank)
    most = sum(weights[name] for name in rankings) / (CONSTANT + 1) or 1.0
    return sorted(((id, score / most) for id, score in found.items()), key=lambda item: (-item[1], item[0]))
