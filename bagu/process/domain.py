"""Whether a row is like the data: the mean distance to its three nearest runs, in inputs scaled to unit spread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

NEAREST = 3
INSIDE = 0.95  # share of the data's own rows that count as inside
CHUNK = 2000


@dataclass(frozen=True)
class Domain:
    """`x` are the rows of the data (encoded), `rows` those that differ, `radius` the distance up to which a row is
    inside."""

    x: np.ndarray
    rows: np.ndarray
    radius: float

    @classmethod
    def of(cls, x: np.ndarray, share: float = INSIDE) -> Self:
        """A row's distance is to other runs: rows with the same values (a batch, a repeated setting) count once."""
        rows = np.unique(x, axis=0)
        if len(rows) <= NEAREST:
            return cls(x, rows, 0.0)
        own = np.concatenate([_mean_distance(rows[i : i + CHUNK], rows, skip=1) for i in range(0, len(rows), CHUNK)])
        return cls(x, rows, float(np.quantile(own, share)))

    def distance(self, x: np.ndarray) -> np.ndarray:
        """The distance over the radius: at most 1 is inside."""
        parts = [_mean_distance(x[i : i + CHUNK], self.rows, skip=0) for i in range(0, len(x), CHUNK)]
        found = np.concatenate(parts)
        return found / self.radius if self.radius else np.where(found > 0, np.inf, 0.0)

    def nearest(self, x: np.ndarray, count: int) -> np.ndarray:
        """The numbers of the nearest rows of one row `x`."""
        return np.argsort(((self.x - x[None]) ** 2).sum(1), kind="stable")[:count]

    def farthest_input(self, x: np.ndarray) -> int:
        """The input in which one row `x` differs most from its nearest runs."""
        near = self.x[self.nearest(x, NEAREST)]
        return int(np.abs(near - x[None]).mean(0).argmax())


def _mean_distance(a: np.ndarray, b: np.ndarray, *, skip: int) -> np.ndarray:
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    count = min(NEAREST + skip, len(b))
    near = np.partition(squares, count - 1, axis=1)[:, :count]
    near.sort(axis=1)
    return np.sqrt(np.maximum(near[:, skip:], 0)).mean(1)
