"""Confidence intervals over a few seeds or rounds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from bagu.eval.intervals import Comparison, Estimate

# two-sided 95 % quantile of Student's t, by the number of values
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


Score = TypeVar("Score", Estimate, Comparison)


def known(found: Score) -> Score:
    """A score, or a difference of scores, with ends: too few clusters for an interval say nothing, so that it is
    everything, 0 to 1 or -1 to 1."""
    if not math.isnan(found.low):
        return found
    return replace(found, low=-1.0 if isinstance(found, Comparison) else 0.0, high=1.0)


class Interval(NamedTuple):
    """A mean and the ends of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the half width of its 95 % confidence interval."""
    spread = statistics.stdev(values)
    return statistics.fmean(values), STUDENT[len(values)] * spread / len(values) ** 0.5


def of_ratio(a: Sequence[float], b: Sequence[float]) -> Interval:
    """The geometric mean of the ratios a[i] / b[i], by a t-interval of their logarithms."""
    mean, half = interval([math.log(x / y) for x, y in zip(a, b, strict=True)])
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def ranks(values: Sequence[float]) -> np.ndarray:
    """The ranks 1, 2, …; equal values share the mean of their ranks."""
    array = np.asarray(values, float)
    below = (array[:, None] > array).sum(1)
    equal = (array[:, None] == array).sum(1)
    return below + (equal + 1) / 2


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Spearman's rank correlation and its 95 % interval by Fisher's transformation; 0 if all values of one are equal.

    Below four points the interval is everything, from -1 to 1.
    """
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    norm = math.sqrt(float((x * x).sum() * (y * y).sum()))
    rho = float((x * y).sum()) / norm if norm else 0.0
    if len(a) < 4:
        return Interval(rho, -1.0, 1.0)
    z, half = math.atanh(max(min(rho, 0.999999), -0.999999)), 1.96 / math.sqrt(len(a) - 3)
    return Interval(rho, math.tanh(z - half), math.tanh(z + half))
