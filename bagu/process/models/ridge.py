"""Quadratic ridge regression: linear terms, squares and products, with the penalty chosen by leave-one-out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

PENALTIES = np.logspace(-3, 4, 15)
MOST_PRODUCTS = 25  # inputs; above, only squares


@dataclass(frozen=True)
class Mean:
    """The baseline: the mean of the training rows."""

    value: float

    @classmethod
    def fit(cls, x: np.ndarray, y: np.ndarray) -> Self:
        return cls(float(y.mean()))

    def on(self, x: np.ndarray, y: np.ndarray) -> Self:
        return self.fit(x, y)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.full(len(x), self.value)

    def arrays(self) -> dict[str, np.ndarray]:
        return {"value": np.array([self.value])}

    @classmethod
    def from_arrays(cls, a: dict[str, np.ndarray]) -> Self:
        return cls(float(a["value"][0]))


@dataclass(frozen=True)
class Ridge:
    weights: np.ndarray
    centre: np.ndarray  # of the features, then of the target
    scale: np.ndarray

    @classmethod
    def fit(cls, x: np.ndarray, y: np.ndarray) -> Self:
        """The leave-one-out error of a ridge is e / (1 - h), with h the diagonal of its hat matrix."""
        f = _features(x)
        centre, scale = f.mean(0), np.where(f.std(0) > 1e-9, f.std(0), 1.0)
        z, target = (f - centre) / scale, y - y.mean()
        u, s, vt = np.linalg.svd(z, full_matrices=False)
        projected = u.T @ target
        errors = []
        for penalty in PENALTIES:
            shrink = s**2 / (s**2 + penalty)
            hat = 1 / len(y) + (u**2 * shrink).sum(1)
            errors.append(float((((target - u @ (shrink * projected)) / np.maximum(1 - hat, 1e-3)) ** 2).mean()))
        penalty = PENALTIES[int(np.argmin(errors))]
        return cls(vt.T @ (s / (s**2 + penalty) * projected), np.r_[centre, y.mean()], scale)

    def on(self, x: np.ndarray, y: np.ndarray) -> Self:
        return self.fit(x, y)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.centre[-1] + (_features(x) - self.centre[:-1]) / self.scale @ self.weights

    def arrays(self) -> dict[str, np.ndarray]:
        return {"weights": self.weights, "centre": self.centre, "scale": self.scale}

    @classmethod
    def from_arrays(cls, a: dict[str, np.ndarray]) -> Self:
        return cls(a["weights"], a["centre"], a["scale"])


def _features(x: np.ndarray) -> np.ndarray:
    if x.shape[1] > MOST_PRODUCTS:
        return np.hstack([x, x**2])
    i, j = np.triu_indices(x.shape[1])
    return np.hstack([x, x[:, i] * x[:, j]])
