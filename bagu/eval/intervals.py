"""The uncertainty of a score: 95 % intervals over clusters, and a paired test of two models.

Items of one cluster (the questions about one passage, the functions of one file) are not independent, so an interval
shows how much a score varies with the choice of clusters. With few clusters three things make the usual interval too
narrow, and each has its remedy:

- the variance of the clusters is itself uncertain: Student's t with Bell and McCaffrey's degrees of freedom (Survey
  Methodology 28, 2002), n - 1 for n equal clusters and fewer where some are large, and half a cluster more of the
  items' own variance, for clusters that are alike by chance;
- a rate near 0 or 1 is skewed: Wilson's interval, with the number of independent items that has this variance (Dean
  and Pagano, J. Surv. Stat. Methodol. 3, 2015);
- the differences of two models are mostly 0: Bonett and Price's two added pairs (J. Educ. Behav. Stat. 37, 2012).

docs/journal/007 has the coverage by simulation. One or two clusters have no interval.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist

import numpy as np

from bagu.errors import ArgumentError

FLIPS = 10_000
LEVEL = 0.95
MIN_CLUSTERS = 3  # for an interval


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean with its 95 % interval, which is NaN to NaN for fewer than MIN_CLUSTERS clusters."""

    mean: float
    low: float
    high: float
    items: int
    clusters: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The mean of b - a over the same items, with its interval, as in `Estimate`, and a two-sided p-value."""

    difference: float
    low: float
    high: float
    p_value: float
    items: int
    clusters: int


def as_row(value: Estimate | Comparison) -> dict[str, float | int | None]:
    """The fields for JSON, which has no NaN: an interval that does not exist is null."""
    return {name: None if math.isnan(field) else field for name, field in asdict(value).items()}


def estimate(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Estimate:
    """The mean of `values`; each value is its own cluster unless `clusters` is given."""
    spread = _spread(values, clusters)
    n, mean, bounded = spread.clusters, spread.mean, min(values) >= 0 and max(values) <= 1
    if n < MIN_CLUSTERS or not bounded:
        low, high = spread.interval()
    else:  # without a variance, as where all items are right, a cluster counts as one item
        a = spread.t**2 / (mean * (1 - mean) / spread.variance if spread.variance else n)
        half = math.sqrt(a * mean * (1 - mean) + a * a / 4)
        low, high = max(0.0, (mean + a / 2 - half) / (1 + a)), min(1.0, (mean + a / 2 + half) / (1 + a))
    return Estimate(mean=mean, low=low, high=high, items=len(values), clusters=n)


def estimate_ratio(
    above: Sequence[float], below: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> Estimate:
    """The sum of `above` over the sum of `below`, e.g. the bits and the bytes of each document."""
    spread = _spread(above, clusters, below)
    low, high = spread.interval()
    return Estimate(mean=spread.mean, low=low, high=high, items=len(above), clusters=spread.clusters)


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
    changes = [y - x for x, y in zip(a, b, strict=True)]
    (sums, _), spread = _by_cluster(changes, clusters), _spread(changes, clusters, below)
    n, observed = len(sums), abs(float(sums.sum()))
    if n <= 13:
        signs = 1 - 2 * ((np.arange(1 << n)[:, None] >> np.arange(n)) & 1)
        exact = 0
    else:
        signs = np.random.default_rng(seed).choice((-1, 1), size=(FLIPS, n))
        exact = 1  # the observed signs are one of the draws
    rounding = n * np.finfo(np.float64).eps * float(np.abs(sums).sum())  # bounds the error of a sum of n terms
    far = np.count_nonzero(np.abs(signs @ sums) >= observed - 2 * rounding)
    bounded = below is None and all(0 <= value <= 1 for value in (*a, *b))  # scores, not logarithms or times
    low, high = _difference(spread, changes) if bounded else spread.interval()
    return Comparison(
        difference=spread.mean,
        low=low,
        high=high,
        p_value=(far + exact) / (len(signs) + exact),
        items=len(a),
        clusters=n,
    )


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


@dataclass(frozen=True, kw_only=True)
class _Spread:
    mean: float
    variance: float  # of the mean, over the choice of clusters
    t: float  # the quantile of Student's t for an interval
    clusters: int

    def interval(self) -> tuple[float, float]:
        if self.clusters < MIN_CLUSTERS:
            return math.nan, math.nan
        half = self.t * math.sqrt(self.variance)
        return self.mean - half, self.mean + half


def _spread(
    values: Sequence[float], clusters: Sequence[Hashable] | None, below: Sequence[float] | None = None
) -> _Spread:
    """The mean of the values, or their sum over that of `below`, as a weighted mean of the clusters' means m.

    Its variance is estimated by m' B m, where B follows from the weights w. The degrees of freedom are those of a
    chi-square with the same first two moments, tr(B)^2 / tr(B^2), if the clusters' means have equal variances."""
    sums, counts = _by_cluster(values, clusters)
    if below is not None:
        counts, _ = _by_cluster(below, clusters)
    n, w = len(sums), counts / counts.sum()
    mean = float(sums.sum() / counts.sum())
    if n < MIN_CLUSTERS:
        return _Spread(mean=mean, variance=math.nan, t=math.nan, clusters=n)
    d = w**2 / (1 - w)  # m' B m is the sum of d (m - mean)^2, unbiased for equal clusters
    variance = float((d * (sums / counts - mean) ** 2).sum())
    if below is None:
        items = float(np.var(np.asarray(values, dtype=np.float64)))
        variance = max(variance + 0.5 * float(d.mean()) * items, items / len(values))
    s, d0, d1, d2 = float(w @ w), float(d.sum()), float(d @ w), float(d @ w**2)
    trace = float((d * (1 + s - 2 * w)).sum())
    square = (s * d0) ** 2 - 4 * s * d0 * d1 + 2 * d0 * d2 + 2 * d1**2 + float((d**2 * (1 + 2 * s - 4 * w)).sum())
    return _Spread(mean=mean, variance=variance, t=_t_quantile(1 - (1 - LEVEL) / 2, trace**2 / square), clusters=n)


def _difference(spread: _Spread, changes: Sequence[float]) -> tuple[float, float]:
    """The interval of a mean of changes within [-1, 1]: a change of +1 and one of -1 are added to as many independent
    items as have this variance."""
    if spread.clusters < MIN_CLUSTERS:
        return spread.interval()
    square = float(np.mean(np.square(changes)))
    items = (square - spread.mean**2) / spread.variance if spread.variance else float(spread.clusters)
    centre, wide = spread.mean * items / (items + 2), (square * items + 2) / (items + 2)
    half = spread.t * math.sqrt((wide - centre**2) / (items + 2))
    return max(-1.0, centre - half), min(1.0, centre + half)


def _t_quantile(p: float, degrees: float) -> float:
    """A quantile of Student's t for p >= 0.5 and 1 or more degrees: with t = sqrt(degrees) tan(x) the density is
    cos(x)^(degrees - 1), which is summed here; accurate to 3 digits."""
    if degrees > 1000:
        return NormalDist().inv_cdf(p)
    x = np.linspace(0, math.pi / 2, 2001)
    density = np.cos(x) ** (degrees - 1)
    total = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    return math.sqrt(degrees) * math.tan(float(np.interp((2 * p - 1) * total[-1], total, x)))
