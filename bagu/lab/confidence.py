"""Confidence intervals over a few seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["interval"]

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # two-sided 95 % quantile of Student's t, by the number of values


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the half width of its 95 % confidence interval."""
    spread = statistics.stdev(values)
    return statistics.fmean(values), STUDENT[len(values)] * spread / len(values) ** 0.5
