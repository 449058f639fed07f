"""Join rankings in units of their standard deviation over all passages, times a weight, summed.

BM25 and cosines have no common unit; in their own deviations they do, and the distance between a first and a
second passage counts, which ranks alone lose. The sum is divided by the most that it can be, so that a passage that is
best everywhere has 1. On `docstring` (docs/journal/019-retrieval.md) this beats reciprocal rank fusion.
"""

from collections.abc import Mapping

import numpy as np


def fuse(
    rankings: Mapping[str, np.ndarray], weights: Mapping[str, float], candidates: np.ndarray, alive: np.ndarray
) -> list[tuple[int, float]]:
    """(id, score from 0 to 1) of the candidates, best first; of two that are equal the lower id is first. `rankings`
    have a score for every passage, and `alive` is False for a deleted one."""
    total, most = np.zeros(len(candidates)), 0.0
    for name, scores in rankings.items():
        deviation = float(scores[alive].std(dtype=np.float64))
        standard = scores[candidates] / (
            deviation or 1.0
        )  # the mean is not subtracted: it would shift all scores equally
        total += weights[name] * standard
        most += weights[name] * max(float(standard.max()), 0.0)
    joined = np.clip(total / (most or 1.0), 0.0, 1.0)
    return [(int(candidates[i]), float(joined[i])) for i in np.lexsort((candidates, -total))]
