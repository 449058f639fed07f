"""Calibration of pair probabilities: does a pair that is preferred with probability p agree with its label as often?

A model that scores s_w and s_l prefers the first with probability sigmoid(s_w - s_l). Its confidence in the side that
it prefers is between 1/2 and 1. The expected calibration error (https://arxiv.org/abs/1706.04599) is the mean distance
between confidence and accuracy over bins of confidence; the Brier score is the mean squared error of the probability.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

BINS = 5


@dataclass(frozen=True, kw_only=True)
class Bin:
    """The pairs whose confidence is in one interval; means are 0 if there are none."""

    pairs: int
    confidence: float
    accuracy: float


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def reliability(margins: Sequence[float], bins: int = BINS) -> list[Bin]:
    """Bins of equal width from 1/2 to 1. `margins` are s_w - s_l; a pair with equal scores is half right."""
    groups: list[list[float]] = [[] for _ in range(bins)]
    for margin in margins:
        confidence = sigmoid(abs(margin))
        groups[min(int((confidence - 0.5) * 2 * bins), bins - 1)].append(margin)
    return [
        Bin(
            pairs=len(group),
            confidence=sum(sigmoid(abs(m)) for m in group) / max(len(group), 1),
            accuracy=sum(0.5 if m == 0 else float(m > 0) for m in group) / max(len(group), 1),
        )
        for group in groups
    ]


def calibration_error(bins: Sequence[Bin]) -> float:
    total = sum(b.pairs for b in bins)
    return sum(b.pairs * abs(b.accuracy - b.confidence) for b in bins) / max(total, 1)


def brier_score(margins: Sequence[float]) -> float:
    return sum(sigmoid(-m) ** 2 for m in margins) / max(len(margins), 1)
