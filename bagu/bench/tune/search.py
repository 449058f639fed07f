"""The search: few, short measurements, chosen by a prediction that they correct.

A prediction (simulated latencies of every point) is the start. Its error is learned from the measurements by a Bayesian
linear regression: for each of TTFT, TPOT and duration, log(measured / predicted) is a sum of one effect per value of a
setting, an effect of the point itself, and noise. Draws of the effects give a distribution of the goodput of every
point, measured or not. The search then

    1. measures the default settings at full length: the baseline, and the cost of a start and of a measurement
    2. explores: measures, with a short load, the point with the highest expected improvement over the best measured
       one, until no point promises 1 %, or the time that is left is needed for step 3
    3. races: measures the points that may be the best (5 % of the draws) at full length, the likeliest first, and drops
       those that the result makes unlikely, until one is left or the time is spent

Goodput is 0 wherever the limits are far away, and no search can find its way on a plain. A hundredth of the throughput,
times limit / latency where that is below 1, is therefore added to it in the search (never in what is reported).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from bagu.bench.tune.simulate import Samples
from bagu.bench.tune.space import Point
from bagu.errors import BaguError

__all__ = ["Found", "Trial", "search"]

DRAWS = 256
EFFECT, OWN, LEVEL = 0.5, 0.15, 1.0  # standard deviations of the log: of a value's effect, of a point's, of the whole
NOISE = 0.08  # of a full measurement; a shorter one has more
PROMISE = 0.003  # expected improvement below this share of the best ends the exploration
MARGIN = 0.9  # of the budget that is planned: the costs are estimates
RACES = 2  # full measurements to leave time for
LIKELY = 0.05  # probability of being the best that keeps a point in the search
SLOPE = 0.01


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One measurement. `seconds` include starting and stopping the server; `error` says why there are no samples."""

    point: Point
    requests: int
    samples: Samples | None
    seconds: float
    start_s: float
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best point, all trials in order, and the time of the search. `grid_s` is an estimate of measuring every point
    at full length, `corrected` the goodput that the corrected prediction expects of every point."""

    best: Point
    trials: tuple[Trial, ...]
    seconds: float
    grid_s: float
    corrected: Mapping[Point, float]


def search(
    points: Sequence[Point],
    predict: Callable[[Point, int], Samples],
    measure: Callable[[Point, int], Trial],
    limits: Mapping[str, float],
    *,
    first: Point,
    requests: int,
    short: int,
    share: float = 0.2,
    seed: int = 0,
) -> Found:
    """Find the point with the highest goodput in at most `share` of the time of the whole grid.

    `first` is the baseline; `requests` and `short` are the requests of a full and of a short measurement. The same
    measurements lead to the same search, so that a stopped one is resumed by replaying its trials.
    """
    predict = cache(predict)
    rng = np.random.default_rng(seed)
    trials = [measure(first, requests)]
    if trials[0].samples is None:
        raise BaguError(f"the first measurement failed: {trials[0].error}", hint="try these settings with bagu serve")
    start = trials[0].start_s

    def spent() -> float:
        return sum(t.seconds for t in trials)

    def grid_s() -> float:
        """The time of the whole grid, by the corrected prediction."""
        return sum(start + predict(p, requests).duration_s * f for p, f in zip(points, slower, strict=True))

    def left(*runs: tuple[int, int]) -> float:
        """Seconds of the budget after these (point, requests) are measured."""
        cost = sum(start + predict(points[i], n).duration_s * slower[i] for i, n in runs)
        return MARGIN * share * grid_s() - spent() - cost

    def goodputs() -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Draws of the goodput, [points, draws], the factor of each duration, and the points that are measured."""
        values, slower = _draws(points, predict, trials, limits, requests, rng)
        for trial in trials:
            i = points.index(trial.point)
            if trial.samples is None:
                values[i] = 0.0
            elif trial.requests == requests:  # its own result counts, not the prediction
                values[i] = _measured(trial.samples, limits, rng)
            elif not any(t.point == trial.point and t.requests == requests for t in trials):
                values[i] = (values[i] + _measured(trial.samples, limits, rng)) / 2  # a short load starts from idle
        works = {t.point for t in trials if t.samples is not None}
        return values, slower, [i for i, p in enumerate(points) if p in works]

    while True:
        values, slower, measured = goodputs()
        best = max(measured, key=lambda i: values[i].mean())
        gain = np.maximum(0.0, values - values[best].mean()).mean(1)
        gain[[i for i, p in enumerate(points) if any(t.point == p for t in trials)]] = 0.0
        pick = int(gain.argmax())
        if gain[pick] < PROMISE * values[best].mean() or left((pick, short), *[(best, requests)] * RACES) < 0:
            break
        trials.append(measure(points[pick], short))
    while True:
        values, slower, measured = goodputs()
        wins = np.bincount(np.array(measured)[values[measured].argmax(0)], minlength=len(points)) / DRAWS
        raced = {t.point for t in trials if t.requests == requests}
        open_ = [i for i in measured if wins[i] >= LIKELY and points[i] not in raced]
        pick = max(open_, key=lambda i: wins[i], default=-1)
        if pick < 0 or left((pick, requests)) < 0:
            break
        trials.append(measure(points[pick], requests))
    values, slower, measured = goodputs()
    full = [points.index(t.point) for t in trials if t.requests == requests and t.samples is not None]
    best = max(full, key=lambda i: values[i].mean())
    return Found(
        best=points[best], trials=tuple(trials), seconds=spent(), grid_s=grid_s(),
        corrected={p: float(v) for p, v in zip(points, values.mean(1), strict=True)},
    )  # fmt: skip


def _draws(
    points: Sequence[Point], predict: Callable[[Point, int], Samples], trials: Sequence[Trial],
    limits: Mapping[str, float], requests: int, rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Draws of the goodput of every point by the corrected prediction, and the median factor of its duration."""
    features, prior = _features(points)
    done = [t for t in trials if t.samples is not None]
    rows = np.array([points.index(t.point) for t in done])
    noise = np.array([NOISE**2 * requests / t.requests for t in done])
    factors = []
    for kind in ("ttft", "tpot", "rate"):
        y = np.log([_level(t.samples, kind) / _level(predict(t.point, t.requests), kind) for t in done])  # type: ignore[arg-type]
        x = features[rows]
        precision = np.diag(1 / prior) + x.T @ (x / noise[:, None])
        covariance = np.linalg.inv(precision)
        mean = covariance @ (x.T @ (y / noise))
        weights = mean[:, None] + np.linalg.cholesky(covariance) @ rng.standard_normal((len(mean), DRAWS))
        factors.append(np.exp(np.clip(features @ weights, -20, 20)))
    values = [_score(predict(p, requests), limits, *(f[i] for f in factors)) for i, p in enumerate(points)]
    return np.stack(values), np.median(factors[2], axis=1)


def _measured(samples: Samples, limits: Mapping[str, float], rng: np.random.Generator) -> np.ndarray:
    """Draws of the goodput by a full measurement: the share of good requests is binomial, the speed has NOISE."""
    one = np.ones(1)
    value, n = float(_score(samples, limits, one, one, one)[0]), len(samples.ttft_s)
    rate = n / samples.duration_s
    share = min(1.0, value / rate)
    spread = rate * (share * (1 - share) / n) ** 0.5 + NOISE / 2 * value
    result: np.ndarray = np.maximum(0.0, value + spread * rng.standard_normal(DRAWS))
    return result


def _level(samples: Samples, kind: str) -> float:
    """The geometric mean of a latency, or the seconds per request."""
    if kind == "rate":
        return samples.duration_s / len(samples.ttft_s)
    return float(np.exp(np.log(np.maximum(getattr(samples, f"{kind}_s"), 1e-6)).mean()))


def _score(
    samples: Samples, limits: Mapping[str, float], ttft: np.ndarray, tpot: np.ndarray, rate: np.ndarray
) -> np.ndarray:
    """The goodput for each draw of the three factors, plus the slope that the module's text explains."""
    good: np.ndarray = np.ones((len(samples.ttft_s), len(rate)))
    near: np.ndarray = np.ones(len(rate))
    for name, factor in (("ttft", ttft), ("tpot", tpot)):
        if name in limits:
            late = 1e3 * np.array(getattr(samples, f"{name}_s"))[:, None] * factor / limits[name]
            good *= late <= 1
            near *= np.minimum(1.0, 1 / np.maximum(late.mean(0), 1e-9))
    throughput = len(samples.ttft_s) / (samples.duration_s * rate)
    result: np.ndarray = throughput * (good.mean(0) + SLOPE * near)
    return result


def _features(points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray]:
    """A row per point: 1, a column per value of each setting, one per point; and the prior variance of each column."""
    values = list(dict.fromkeys(pair for p in points for pair in p))
    columns = np.array([[1.0, *(float(v in p) for v in values)] for p in points])
    prior = np.array([LEVEL**2, *[EFFECT**2] * len(values), *[OWN**2] * len(points)])
    return np.hstack([columns, np.eye(len(points))]), prior
