"""The model of one target: a weighted ensemble, an interval whose coverage was checked, and monotone signs.

The interval is conformal over cross-validation: with out-of-fold errors e and spreads s, its half-width is the quantile
q of |e| / s times s(x) (cross-conformal, Vovk 2015; CV+ without its factor of two). The levels of one category, that
whose quantiles differ most, have a q of their own (Mondrian; Vovk et al. 2005): a noisy line does not hide behind quiet
ones. Signs hold for the mean and both ends: along a signed input each of the three functions is replaced by the mean of
its smallest increasing majorant and its largest increasing minorant on a grid, which is increasing and keeps their
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from bagu.process.models.gp import GP

COVERAGE = 0.9
FEWEST = 30  # rows of a level or a group that has a quantile, or a coverage, of its own
GRID = {1: 33, 2: 9, 3: 5}  # points per signed input


class Model(Protocol):
    def predict(self, x: np.ndarray) -> np.ndarray: ...
    def arrays(self) -> dict[str, np.ndarray]: ...


class Prediction(NamedTuple):
    """`sd` is the uncertainty of the mean, `low` and `high` the interval of the next measured row."""

    mean: np.ndarray
    sd: np.ndarray
    low: np.ndarray
    high: np.ndarray
    spread: np.ndarray  # standard deviation of a measured row


@dataclass(frozen=True)
class TargetModel:
    members: Mapping[str, Model]
    weights: Mapping[str, float]
    quantile: float
    levels: Mapping[int, float]  # the quantile of rows with a level, by its column of the matrix
    signs: np.ndarray  # of each column of the matrix
    lows: np.ndarray  # range of each column in the data, for the grid of signed ones
    highs: np.ndarray

    @property
    def gp(self) -> GP:
        found = self.members["gp"]
        assert isinstance(found, GP)
        return found

    def predict(self, x: np.ndarray) -> Prediction:
        signed = np.flatnonzero(self.signs)[:3]
        if not len(signed):
            return self._raw(x)
        columns = monotone(lambda rows: np.stack(self._raw(rows), 1), x, signed, self)
        mean, sd, low, high, spread = columns.T
        return Prediction(mean, sd, low, high, spread)

    def _raw(self, x: np.ndarray) -> Prediction:
        mean, sd, spread = ensemble(self.members, self.weights, x)
        half = row_quantiles(x, self.quantile, self.levels) * spread
        return Prediction(mean, sd, mean - half, mean + half, spread)


def ensemble(members: Mapping[str, Model], weights: Mapping[str, float], x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Mean, uncertainty of the mean, and spread of a measured row. The uncertainty is that of the Gaussian process and
    the disagreement of the members."""
    gp = members["gp"]
    assert isinstance(gp, GP)
    centre, sd = gp.mean_sd(x)
    parts = {n: centre if n == "gp" else members[n].predict(x) for n, w in weights.items() if w > 0}
    mean = sum((weights[n] * p for n, p in parts.items()), np.zeros(len(x)))
    apart = sum((weights[n] * (p - mean) ** 2 for n, p in parts.items()), np.zeros(len(x)))
    total = np.sqrt(sd**2 + apart)
    return mean, total, np.sqrt(total**2 + gp.noise**2)


def monotone(
    function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, signed: np.ndarray, of: TargetModel
) -> np.ndarray:
    """Columns mean, sd, low, high, spread of `function` with the signs enforced on mean, low and high."""
    if not len(signed):
        return function(x)
    column, rest = int(signed[0]), signed[1:]
    grid = np.linspace(of.lows[column], of.highs[column], GRID[min(3, len(np.flatnonzero(of.signs)))])
    rows = np.repeat(x, len(grid), 0)
    rows[:, column] = np.tile(grid, len(x))
    values = monotone(function, rows, rest, of).reshape(len(x), len(grid), -1)
    rising = values if of.signs[column] > 0 else values[:, ::-1]
    mended = (np.maximum.accumulate(rising, 1) + np.minimum.accumulate(rising[:, ::-1], 1)[:, ::-1]) / 2
    mended = mended if of.signs[column] > 0 else mended[:, ::-1]
    place = np.clip((x[:, column] - grid[0]) / (grid[1] - grid[0]), 0, len(grid) - 1)
    at = np.minimum(place.astype(int), len(grid) - 2)
    share = (place - at)[:, None]
    every = np.arange(len(x))
    below, above = mended[every, at], mended[every, at + 1]
    found = below + share * (above - below)
    ends = np.minimum(below, above), np.maximum(below, above)
    found = np.clip(found, *ends)  # rounding must not undo the order
    found[:, [1, 4]] = (values[every, at] + share * (values[every, at + 1] - values[every, at]))[:, [1, 4]]
    return found


def conformal_quantile(scores: np.ndarray, coverage: float = COVERAGE) -> float:
    """The smallest score that is at or above a share of ⌈(n + 1) coverage⌉ / n; the largest one for few scores."""
    ordered = np.sort(scores)
    return float(ordered[min(len(ordered), int(np.ceil((len(ordered) + 1) * coverage))) - 1])


def level_quantiles(x: np.ndarray, scores: np.ndarray, categories: Iterable[np.ndarray]) -> dict[int, float]:
    """Quantiles of the levels that have FEWEST rows, of the category whose quantiles differ most. Each category is its
    columns of `x`."""
    best: dict[int, float] = {}
    for columns in categories:
        rows = {int(j): x[:, j] > 0 for j in columns}
        found = {j: conformal_quantile(scores[r]) for j, r in rows.items() if r.sum() >= FEWEST}
        if len(found) > 1 and (not best or _ratio(found) > _ratio(best)):
            best = found
    return best


def _ratio(quantiles: Mapping[int, float]) -> float:
    return max(quantiles.values()) / max(min(quantiles.values()), 1e-12)


def row_quantiles(x: np.ndarray, quantile: float, levels: Mapping[int, float]) -> np.ndarray:
    found = np.full(len(x), quantile)
    for column, q in levels.items():
        found[x[:, column] > 0] = q
    return found


def greedy_weights(predictions: Mapping[str, np.ndarray], y: np.ndarray, rounds: int = 25) -> dict[str, float]:
    """Weights by greedy selection with repetition (Caruana et al. 2004): each round adds the model that lowers the
    squared error most."""
    names = list(predictions)
    total, counts = np.zeros(len(y)), dict.fromkeys(names, 0)
    for step in range(1, rounds + 1):
        errors = [float((((total + predictions[n]) / step - y) ** 2).mean()) for n in names]
        best = names[int(np.argmin(errors))]
        counts[best] += 1
        total += predictions[best]
    return {name: count / rounds for name, count in counts.items()}


def error_weights(predictions: Mapping[str, np.ndarray], y: np.ndarray, power: float = 8.0) -> dict[str, float]:
    """Weights in proportion to RMSE ** -power, for few rows: the best mixture of those is not that of the next ones.
    Powers from 4 to 16 differ little (docs/journal/018). A share below a hundredth of the best one's is left out."""
    errors = {n: max(float(np.sqrt(((p - y) ** 2).mean())), np.finfo(float).tiny) for n, p in predictions.items()}
    shares = {n: (min(errors.values()) / error) ** power for n, error in errors.items()}
    shares = {n: share if share >= 0.01 else 0.0 for n, share in shares.items()}
    return {n: share / sum(shares.values()) for n, share in shares.items()}
