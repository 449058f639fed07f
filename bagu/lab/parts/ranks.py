"""Rank correlation with its interval: whether one quantity orders points as another does."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bagu.bench.ranks import spearman
from bagu.lab.parts.confidence import Interval

__all__ = ["rank_correlation"]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Spearman's rank correlation and its 95 % interval by Fisher's transformation; 0 if all values of one are equal.

    Below four points the interval is everything, from -1 to 1.
    """
    rho = spearman(a, b)
    if len(a) < 4:
        return Interval(rho, -1.0, 1.0)
    z, half = math.atanh(max(min(rho, 0.999999), -0.999999)), 1.96 / math.sqrt(len(a) - 3)
    return Interval(rho, math.tanh(z - half), math.tanh(z + half))
