"""Ranks, and Spearman's rank correlation: whether one quantity orders points as another does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["ranks", "spearman"]


def ranks(values: Sequence[float]) -> np.ndarray:
    """The ranks 1, 2, …; equal values share the mean of their ranks."""
    array = np.asarray(values, float)
    below = (array[:, None] > array).sum(1)
    equal = (array[:, None] == array).sum(1)
    return below + (equal + 1) / 2


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation; 0 if all values of one are equal."""
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    norm = math.sqrt(float((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / norm if norm else 0.0
