"""An exact Gaussian process in fp64: Matérn 5/2 with a length per input, hyperparameters by maximum a posteriori.

With r² = Σ ((x - x') / l)² the kernel is s² (1 + √5 r + 5/3 r²) exp(-√5 r), plus a noise variance on the diagonal
(Rasmussen and Williams, eq. 4.17 and 5.9). Inputs are standardised by the encoder, the target here. The prior of a
length is log-normal around 1.5 √d standard deviations: with many inputs, distances grow with √d (Hvarfner et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from bagu.errors import BaguError
from bagu.process.models.minimize import minimize

MAX_ROWS = 2000  # of the posterior; K is inverted once, n³
SEARCH_ROWS = 400  # of the search of hyperparameters: 60 inversions
LOG_NOISE = (np.log(0.1), 1.5)  # prior of the noise variance, for a target of variance 1: centre, spread
LOG_SIGNAL = (0.0, 1.0)
CHUNK = 4000  # rows of a prediction at once
ROOT5 = np.sqrt(5.0)


@dataclass(frozen=True)
class GP:
    """`theta` is log lengths, log signal variance, log noise variance."""

    theta: np.ndarray
    x: np.ndarray
    y: np.ndarray  # standardised
    centre: float
    scale: float
    inverse: np.ndarray  # of K + noise
    alpha: np.ndarray

    @classmethod
    def fit(cls, x: np.ndarray, y: np.ndarray) -> Self:
        """Search the hyperparameters on at most SEARCH_ROWS rows, then condition on at most MAX_ROWS."""
        rows = spread_rows(len(y), SEARCH_ROWS)
        target = _standardised(y[rows])[0]
        d = x.shape[1]
        prior = np.array([[np.log(1.5 * np.sqrt(d)), 1.0]] * d + [LOG_SIGNAL, LOG_NOISE])
        best, value = prior[:, 0], np.inf
        for shift in (0.0, -1.0):  # from long lengths, and from short ones
            start = prior[:, 0].copy()
            start[:d] += shift
            found, at = minimize(lambda theta: _objective(theta, x[rows], target, prior), start, steps=60)
            if at < value:
                best, value = found, at
        return cls.given(best, x, y)

    @classmethod
    def given(cls, theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> Self:
        """Condition on rows with known hyperparameters."""
        rows = spread_rows(len(y), MAX_ROWS)
        target, centre, scale = _standardised(y[rows])
        inverse, alpha, _ = _solve(theta, _kernel(theta, x[rows], x[rows])[0], target)
        return cls(theta, x[rows], target, centre, scale, inverse, alpha)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.mean_sd(x)[0]

    def mean_sd(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the function, without noise."""
        parts = [self._chunk(x[i : i + CHUNK]) for i in range(0, len(x), CHUNK)]
        mean, sd = (np.concatenate(both) for both in zip(*parts, strict=True))
        return self.centre + self.scale * mean, self.scale * sd

    def _chunk(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        k = _kernel(self.theta, x, self.x)[0]
        variance = np.exp(self.theta[-2]) - np.einsum("ij,ij->i", k @ self.inverse, k)
        return k @ self.alpha, np.sqrt(np.maximum(variance, 1e-12))

    @property
    def noise(self) -> float:
        """The standard deviation of the noise, in units of the target."""
        return float(self.scale * np.exp(0.5 * self.theta[-1]))

    def on(self, x: np.ndarray, y: np.ndarray) -> Self:
        """The same hyperparameters on other rows."""
        return self.given(self.theta, x, y)

    def arrays(self) -> dict[str, np.ndarray]:
        scaling = np.array([self.centre, self.scale])
        return {"theta": self.theta, "x": self.x, "y": self.y, "scaling": scaling, "inverse": self.inverse}

    @classmethod
    def from_arrays(cls, a: dict[str, np.ndarray]) -> Self:
        centre, scale = map(float, a["scaling"])
        return cls(a["theta"], a["x"], a["y"], centre, scale, a["inverse"], a["inverse"] @ a["y"])


def spread_rows(count: int, limit: int) -> np.ndarray:
    """At most `limit` of `count` rows, the same ones each time."""
    if count <= limit:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).permutation(count)[:limit])


def _standardised(y: np.ndarray) -> tuple[np.ndarray, float, float]:
    centre, scale = float(y.mean()), float(y.std()) or 1.0
    return (y - centre) / scale, centre, scale


def _kernel(theta: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The kernel of two sets of rows, and the factor that its derivatives share: 5/3 s² (1 + √5 r) exp(-√5 r)."""
    lengths, signal = np.exp(theta[:-2]), np.exp(theta[-2])
    a, b = a / lengths, b / lengths
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    r = ROOT5 * np.sqrt(np.maximum(squares, 0))
    decay = signal * np.exp(-r)
    return decay * (1 + r + r**2 / 3), 5 / 3 * decay * (1 + r)


def _solve(theta: np.ndarray, k: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """The inverse of K + noise, alpha, and the log determinant."""
    k = k.copy()
    k[np.diag_indices(len(k))] += np.exp(theta[-1]) + 1e-8
    try:
        factor = np.linalg.cholesky(k)
    except np.linalg.LinAlgError:
        raise BaguError("the Gaussian process found no stable fit", hint="remove columns that are copies") from None
    inverse = np.linalg.inv(k)
    inverse = (inverse + inverse.T) / 2
    return inverse, inverse @ y, 2 * float(np.log(np.diag(factor)).sum())


def _objective(theta: np.ndarray, x: np.ndarray, y: np.ndarray, prior: np.ndarray) -> tuple[float, np.ndarray]:
    """The negative log posterior of the hyperparameters and its gradient."""
    k, shared = _kernel(theta, x, x)
    inverse, alpha, log_det = _solve(theta, k, y)
    gap = (theta - prior[:, 0]) / prior[:, 1]
    value = 0.5 * (y @ alpha + log_det) + 0.5 * float(gap @ gap)
    weight = np.outer(alpha, alpha) - inverse
    g = weight * shared
    # Σ_ab g_ab (x_a - x_b)² per input, without an array of n² d numbers
    spread = 2 * ((g.sum(1)[:, None] * x**2).sum(0) - (x * (g @ x)).sum(0)) / np.exp(2 * theta[:-2])
    gradient = np.r_[spread, (weight * k).sum(), np.trace(weight) * np.exp(theta[-1])]
    return value, -0.5 * gradient + gap / prior[:, 1]
