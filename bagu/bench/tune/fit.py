"""The roofline fitted to measurements: a distribution of the goodput of every point, measured or not.

    step = exp(effects) (exp(a) overhead + max(exp(b) bytes / bandwidth, exp(c) FLOPs / rate))

a, b, c correct the machine; `effects` is a sum with a term for each value of a setting, e.g. int8 or two threads. The
schedules of a point turn the times of its steps into latencies (simulate.py). What is left is an error of TTFT, TPOT
and duration that all points share (HTTP, the requests that were drawn), and one of each point. All unknowns have normal
priors around 0. The data of a measurement are three numbers: the logarithms of the geometric means of TTFT and TPOT,
and of the seconds per request. The posterior is approximated by a normal distribution at its maximum (Gauss-Newton
with Levenberg's damping).

Goodput itself is no datum: it counts requests below a limit, and where the latencies are near the limit, 3 % in speed
are 20 % in goodput. All measurements together know the speed better than one of them knows the goodput. Of a full
measurement the distribution of the latencies is used, moved to the speed of the fit.

Dims: P = points, N = measurements, W = unknowns of the formula, U = all unknowns, D = draws, R = requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from bagu.bench.tune.roofline import Roofline
from bagu.bench.tune.simulate import Samples, Schedule, StepTime
from bagu.bench.tune.space import SCHEDULING, Point

# Standard deviations of the logarithms.
MACHINE = 1.0  # of a, b, c
EFFECT = 0.5  # of a value
SCHEDULED = 0.03  # of a value that changes the schedule: the simulation has its effect
SHARED = 0.1  # of the errors that all points share
OWN = 0.03  # of a point's own errors
NOISE = np.array([0.08, 0.04, 0.05])  # of TTFT, TPOT and duration in a full measurement
ROUNDS = 8
STEP = 1e-4  # of the derivatives


class Measured(NamedTuple):
    """A measurement of the point with index `point`. `share` is its number of requests over that of a full one."""

    point: int
    share: float
    samples: Samples
    schedules: Sequence[Schedule]  # simulated ones of loads like that of the measurement


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """The posterior of the unknowns: a, b, c, the effects, the 3 shared errors, and 3 errors of each point."""

    roofline: Roofline
    points: Sequence[Point]
    features: np.ndarray  # [P, values]: 1 where the point has the value
    mean: np.ndarray  # [U]
    covariance: np.ndarray  # [U, U]

    @classmethod
    def prior(cls, roofline: Roofline, points: Sequence[Point]) -> Fit:
        values = list(dict.fromkeys(pair for p in points for pair in p))
        features = np.array([[float(v in p) for v in values] for p in points])
        effects = [SCHEDULED if name in SCHEDULING else EFFECT for name, _ in values]
        deviations = np.array([*[MACHINE] * 3, *effects, *[SHARED] * 3, *[OWN] * (3 * len(points))])
        return cls(
            roofline=roofline,
            points=points,
            features=features,
            mean=np.zeros(len(deviations)),
            covariance=np.diag(deviations**2),
        )

    @property
    def width(self) -> int:
        """W."""
        return 6 + self.features.shape[1]

    def step_time(self, i: int) -> StepTime:
        """The formula of point i at the mean."""

        def seconds(*step: int) -> float:
            return float(self._seconds(i, np.array([step]), self.mean[:, None])[0, 0])

        return seconds

    def duration_s(self, i: int, schedules: Sequence[Schedule]) -> float:
        """The seconds of a load, at the mean."""
        return float(self.latencies(i, schedules, self.mean[:, None])[2][0])

    def draws(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draws of the unknowns, [U, D]."""
        root = np.linalg.cholesky(self.covariance)
        return np.asarray(self.mean[:, None] + root @ rng.standard_normal((len(self.mean), count)))

    def latencies(
        self, i: int, schedules: Sequence[Schedule], unknowns: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """TTFT [R, D] and TPOT [R, D] of the requests of all schedules, and the mean duration [D]."""
        own = self.width + 3 * i
        errors = np.exp(unknowns[self.width - 3 : self.width] + unknowns[own : own + 3])
        found = [s.latencies(self._seconds(i, s.steps, unknowns)) for s in schedules]
        ttft, tpot = (np.concatenate([f[k] for f in found]) * errors[k] for k in (0, 1))
        return ttft, tpot, np.mean([f[2] for f in found], axis=0) * errors[2]

    def goodput(
        self,
        i: int,
        schedules: Sequence[Schedule],
        unknowns: np.ndarray,
        full: Sequence[Samples],
        score: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """`score(ttft [R, D], tpot [R, D], requests per second [D])` for each draw of the unknowns. `full` are the full
        measurements of the point: their latencies are used, multiplied so that their means are those of the draw."""
        ttft, tpot, duration = self.latencies(i, schedules, unknowns)
        rate = len(schedules[0].first) / duration
        if not full:
            return score(ttft, tpot, rate)
        means = [_geometric(ttft), _geometric(tpot)]
        moved = [
            [np.array(x)[:, None] * (mean / _geometric(np.array(x))) for x, mean in zip(pair, means, strict=True)]
            for pair in ((s.ttft_s, s.tpot_s) for s in full)
        ]
        return np.asarray(np.mean([score(first, each, rate) for first, each in moved], axis=0))

    def _seconds(self, i: int, steps: np.ndarray, unknowns: np.ndarray) -> np.ndarray:
        """The times of steps [S, 3] by the formula: [S, D]."""
        overhead, data, flops = self.roofline.parts(self.points[i])(*steps.T[:, :, None])
        a, b, c = np.exp(unknowns[:3] + self.features[i] @ unknowns[3 : self.width - 3])
        return np.asarray(a * overhead + np.maximum(b * data, c * flops))


def fit(prior: Fit, measured: Sequence[Measured], start: np.ndarray) -> Fit:
    """The posterior; the search for its maximum begins at `start`."""
    variance = np.diag(prior.covariance)
    y = np.concatenate([_measured_levels(m.samples) for m in measured])
    # Not 1 / share: a part of the noise is between measurements, not between requests.
    noise = np.concatenate([NOISE**2 / m.share**0.5 for m in measured])
    own = np.zeros((len(y), len(variance)))
    for n, m in enumerate(measured):
        own[range(3 * n, 3 * n + 3), range(prior.width + 3 * m.point, prior.width + 3 * m.point + 3)] = 1.0

    def predicted(unknowns: np.ndarray) -> np.ndarray:
        """[3 N, D]."""
        rows = []
        for m in measured:
            ttft, tpot, duration = prior.latencies(m.point, m.schedules, unknowns)
            rows.append(_levels(ttft, tpot, duration / len(m.schedules[0].first)))
        return np.concatenate(rows)

    def loss(unknowns: np.ndarray, found: np.ndarray) -> float:
        return float(((y - found) ** 2 / noise).sum() + (unknowns**2 / variance).sum())

    mean, damping, going = start, 1e-3, True
    now = predicted(mean[:, None])[:, 0]
    for _ in range(ROUNDS):
        shifted = mean[:, None] + STEP * np.eye(len(mean), prior.width)
        jacobian = own.copy()
        jacobian[:, : prior.width] = (predicted(shifted) - now[:, None]) / STEP
        precision = jacobian.T @ (jacobian / noise[:, None]) + np.diag(1 / variance)
        if not going:
            break
        slope = jacobian.T @ ((y - now) / noise) - mean / variance
        before, going = loss(mean, now), False
        while damping < 1e4:
            moved = mean + np.linalg.solve(precision + damping * np.diag(np.diag(precision)), slope)
            after = predicted(moved[:, None])[:, 0]
            if (value := loss(moved, after)) < before:
                mean, now, damping, going = moved, after, damping / 10, before - value > 1e-3 * before
                break
            damping *= 10
    return replace(prior, mean=mean, covariance=np.linalg.inv(precision))


def _measured_levels(samples: Samples) -> np.ndarray:
    ttft, tpot = (np.array(x)[:, None] for x in (samples.ttft_s, samples.tpot_s))
    return _levels(ttft, tpot, np.array([samples.duration_s / len(ttft)]))[:, 0]


def _levels(ttft: np.ndarray, tpot: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The logarithms of the geometric means of TTFT and TPOT [R, D], and of the seconds per request [D]: [3, D]."""
    return np.log(np.stack([_geometric(ttft), _geometric(tpot), seconds]))


def _geometric(latency: np.ndarray) -> np.ndarray:
    """The geometric mean over the requests. The TPOT of a request with one token is 0."""
    return np.asarray(np.exp(np.log(np.maximum(latency, 1e-6)).mean(0)))
