"""The uncertainty of a score: 95 % intervals by the bootstrap, and a paired test of two models.

Items of one cluster (the questions about one passage, the functions of one file) are not independent, so the bootstrap
resamples clusters. An interval shows how much a score varies with the choice of clusters.

The percentile bootstrap is too narrow for few clusters. Its percentiles are therefore widened to those of Student's t
with the small-sample factor sqrt(n / (n - 1)) (Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, 5.3).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from bagu.errors import ArgumentError

RESAMPLES = 4000
FLIPS = 10_000
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float
    items: int
    clusters: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The mean of b - a over the same items, with its interval and a two-sided p-value."""

    difference: float
    low: float
    high: float
    p_value: float
    items: int
    clusters: int


def estimate(values: Sequence[float], clusters: Sequence[Hashable] | None = None, *, seed: int = 0) -> Estimate:
    """The mean of `values`; each value is its own cluster unless `clusters` is given."""
    sums, counts = _by_cluster(values, clusters)
    mean, n = float(sums.sum() / counts.sum()), len(sums)
    low, high = (min(values), max(values)) if n == 1 else _interval(sums, counts, seed)  # no estimate from one cluster
    if low == high and mean in (0.0, 1.0):  # all items right or all wrong: the bootstrap has no variance
        margin = 1 - (1 - LEVEL) ** (1 / n)  # a higher rate would have been observed with probability 0.95
        low, high = max(0.0, mean - margin), min(1.0, mean + margin)
    return Estimate(mean=mean, low=low, high=high, items=len(values), clusters=n)


def estimate_ratio(
    above: Sequence[float], below: Sequence[float], clusters: Sequence[Hashable] | None = None, *, seed: int = 0
) -> Estimate:
    """The sum of `above` over the sum of `below`, e.g. the bits and the bytes of each document."""
    sums, _ = _by_cluster(above, clusters)
    counts, _ = _by_cluster(below, clusters)
    low, high = _interval(sums, counts, seed)
    return Estimate(mean=float(sums.sum() / counts.sum()), low=low, high=high, items=len(above), clusters=len(sums))


def compare(
    a: Sequence[float],
    b: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    below: Sequence[float] | None = None,
    seed: int = 0,
) -> Comparison:
    """Two models on the same items. The difference is per item, or per unit of `below`, as in `estimate_ratio`. Under
    the null hypothesis the sign of a cluster's difference is random, so the p-value is the fraction of random signs
    that move the mean at least as far (exact for at most 13 clusters)."""
    if len(a) != len(b):
        raise ArgumentError(f"a has {len(a)} items and b has {len(b)}", hint="compare two results of one task")
    sums, counts = _by_cluster([y - x for x, y in zip(a, b, strict=True)], clusters)
    if below is not None:
        counts, _ = _by_cluster(below, clusters)
    n, observed = len(sums), abs(float(sums.sum()))
    if n <= 13:
        signs = 1 - 2 * ((np.arange(1 << n)[:, None] >> np.arange(n)) & 1)
        exact = 0
    else:
        signs = np.random.default_rng(seed).choice((-1, 1), size=(FLIPS, n))
        exact = 1  # the observed signs are one of the draws
    rounding = n * np.finfo(np.float64).eps * float(np.abs(sums).sum())  # bounds the error of a sum of n terms
    far = np.count_nonzero(np.abs(signs @ sums) >= observed - 2 * rounding)
    low, high = _interval(sums, counts, seed)
    return Comparison(
        difference=float(sums.sum() / counts.sum()), low=low, high=high, p_value=(far + exact) / (len(signs) + exact),
        items=len(a), clusters=n,
    )  # fmt: skip


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples is correct (https://arxiv.org/abs/2107.03374):
    1 - C(n - c, k) / C(n, k)."""
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ArgumentError(f"pass@{k} of {samples} samples, {correct} of them correct", hint="k is 1 to samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def _by_cluster(values: Sequence[float], clusters: Sequence[Hashable] | None) -> tuple[np.ndarray, np.ndarray]:
    """The sum and the number of the values of each cluster."""
    if not values:
        raise ArgumentError("a score of no items", hint="the task is empty")
    if clusters is None:
        return np.asarray(values, dtype=np.float64), np.ones(len(values))
    if len(clusters) != len(values):
        raise ArgumentError(f"{len(values)} values in {len(clusters)} clusters", hint="one cluster name per value")
    places = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    index = np.array([places[name] for name in clusters])
    return np.bincount(index, weights=np.asarray(values, dtype=np.float64)), np.bincount(index).astype(np.float64)


def _interval(sums: np.ndarray, counts: np.ndarray, seed: int) -> tuple[float, float]:
    n = len(sums)
    if n == 1:
        return float(sums[0] / counts[0]), float(sums[0] / counts[0])
    rng, means, step = np.random.default_rng(seed), [], max(1, 4_000_000 // n)
    for done in range(0, RESAMPLES, step):
        drawn = rng.integers(n, size=(min(step, RESAMPLES - done), n))
        means.append(sums[drawn].sum(1) / counts[drawn].sum(1))
    tail = NormalDist().cdf(-_t_quantile(1 - (1 - LEVEL) / 2, n - 1) * math.sqrt(n / (n - 1)))
    low, high = np.quantile(np.concatenate(means), (tail, 1 - tail))
    return float(low), float(high)


def _t_quantile(p: float, degrees: int) -> float:
    """A quantile of Student's t: exact for 1 and 2 degrees, else a series around the normal's, accurate to 3 digits."""
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees ** (i + 1) for i, term in enumerate(terms))
