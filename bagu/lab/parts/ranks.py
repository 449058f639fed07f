"""Spearman's rank correlation with its interval: whether one quantity orders points as another does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bagu.lab.parts.confidence import Interval


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
