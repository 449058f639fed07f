"""The search: few, short measurements, chosen by a prediction that they correct.

A roofline predicts the latencies of every point, and every measurement corrects it for all of them (fit.py): draws of
its unknowns give a distribution of the goodput of every point, measured or not. The search then

    1. measures the default settings at full length: the baseline, and the cost of a start and of a measurement
    2. explores: measures, with a short load, the point with the highest expected improvement over the best measured
       one, until no point promises 0.2 %, or the time that is left is needed for step 3
    3. decides: measures points that may be the best (5 % of the draws) at full length, in turn, until one is left or
       the time is spent. The same point may be measured again: one measurement has noise.

Goodput is 0 wherever the limits are far away, and equal values give a search no direction. A hundredth of the
throughput, times limit / latency where that is below 1, is therefore added to it in the search (never in what is
reported).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bagu.bench.tune.fit import Fit, Measured, fit
from bagu.bench.tune.roofline import Roofline
from bagu.bench.tune.simulate import Samples, Schedule, StepTime
from bagu.bench.tune.space import Point
from bagu.errors import BaguError
from bagu.runs.record import append_rows, read_rows

# The schedules of several loads with this number of requests and these times: the winner should not be the best for
# one sample of requests.
Plan = Callable[[Point, int, StepTime], Sequence[Schedule]]

DRAWS = 64
PROMISE = 0.002  # expected improvement below this share of the best ends the exploration
MARGIN = 0.93  # of the budget that is planned: the costs are estimates
FULL_MEASUREMENTS = 3  # to leave time for
LIKELY = 0.05  # probability of being the best that keeps a point in the search
SLOPE = 0.01  # share of the throughput that is added to the goodput, see above


class Recorded:
    """Measures, and appends the result to the record, so that a search that was stopped resumes where it was: what is
    in the record is not measured again (`replayed`). A row belongs to a search by its `search` field, a fingerprint of
    the model, the load, the limits and the space; rows of other searches are ignored."""

    def __init__(self, path: Path, search: str, measure: Callable[[Point, int], Trial]) -> None:
        self.path, self.search, self.measure, self.replayed = path, search, measure, 0
        self.known: dict[tuple[Point, int], deque[dict[str, Any]]] = {}  # the same point may be measured again
        for row in read_rows(path) if path.exists() else []:
            if row.get("search") == search:
                self.known.setdefault(_key(row), deque()).append(row)

    def __call__(self, point: Point, requests: int) -> Trial:
        if rows := self.known.get((point, requests)):
            self.replayed += 1
            return _trial(rows.popleft())
        trial = self.measure(point, requests)
        append_rows(self.path, [{"search": self.search, **asdict(trial), "point": dict(point)}])
        return trial


def _key(row: dict[str, Any]) -> tuple[Point, int]:
    return tuple(row["point"].items()), row["requests"]


def _trial(row: dict[str, Any]) -> Trial:
    samples = row["samples"]
    if samples is not None:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in samples.items()}
        samples = Samples(**values)
    fields = {k: v for k, v in row.items() if k not in ("search", "point", "samples")}
    return Trial(**fields, point=tuple(row["point"].items()), samples=samples)


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
    roofline: Roofline,
    plan: Plan,
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
    baseline = measure(first, requests)
    if baseline.samples is None:
        raise BaguError(f"the first measurement failed: {baseline.error}", hint="try these settings with bagu serve")
    model = _Model(points, roofline, plan, limits, requests, np.random.default_rng(seed))
    run = _Search(model, measure, baseline, requests=requests, short=short, share=share)
    run.explore()
    run.decide()
    return run.found()


class _Search:
    """The trials so far, and the next ones. Points are given by their numbers."""

    def __init__(
        self,
        model: _Model,
        measure: Callable[[Point, int], Trial],
        baseline: Trial,
        *,
        requests: int,
        short: int,
        share: float,
    ) -> None:
        self.model, self.points, self.measure, self.trials = model, model.points, measure, [baseline]
        self.requests, self.short, self.share, self.start_s = requests, short, share, baseline.start_s

    @property
    def spent_s(self) -> float:
        return sum(t.seconds for t in self.trials)

    def left_s(self, *runs: tuple[int, int]) -> float:
        """Seconds of the budget after these (point, requests) are measured."""
        planned = MARGIN * self.share * self.model.grid_s(self.start_s)
        return planned - self.spent_s - sum(self.start_s + self.model.duration_s(i, n) for i, n in runs)

    def explore(self) -> None:
        """Measure with a short load while a point promises an improvement, and time is left to decide."""
        while True:
            values = self.model.goodputs(self.trials)
            best = max((self._number(t) for t in self.trials if t.samples), key=lambda i: values[i].mean())
            gain = np.maximum(0.0, values - values[best].mean()).mean(1)
            gain[[self._number(t) for t in self.trials]] = 0.0
            pick = int(gain.argmax())
            ahead = [(pick, self.short), *[(best, self.requests)] * FULL_MEASUREMENTS]
            if gain[pick] < PROMISE * values[best].mean() or self.left_s(*ahead) < 0:
                return
            self.trials.append(self.measure(self.points[pick], self.short))

    def decide(self) -> None:
        """Measure at full length, in turn, what may be the best, until one point is left or the time is spent."""
        while True:
            values = self.model.goodputs(self.trials)
            times = Counter(self._number(t) for t in self.trials if t.requests == self.requests)
            wins = np.bincount(values.argmax(0), minlength=len(self.points)) / DRAWS
            likely = [i for i in range(len(self.points)) if wins[i] >= LIKELY] or [int(wins.argmax())]
            pick = max(likely, key=lambda i: (-times[i], wins[i]))
            if (len(likely) == 1 and times[pick]) or self.left_s((pick, self.requests)) < 0:
                return
            self.trials.append(self.measure(self.points[pick], self.requests))

    def found(self) -> Found:
        values = self.model.goodputs(self.trials)
        full = [self._number(t) for t in self.trials if t.requests == self.requests and t.samples is not None]
        best = max(full, key=lambda i: values[i].mean())
        return Found(
            best=self.points[best],
            trials=tuple(self.trials),
            seconds=self.spent_s,
            grid_s=self.model.grid_s(self.start_s),
            corrected={p: float(v) for p, v in zip(self.points, values.mean(1), strict=True)},
        )

    def _number(self, trial: Trial) -> int:
        return self.points.index(trial.point)


class _Model:
    """The fit, and the schedules that it needs."""

    def __init__(
        self,
        points: Sequence[Point],
        roofline: Roofline,
        plan: Plan,
        limits: Mapping[str, float],
        requests: int,
        rng: np.random.Generator,
    ) -> None:
        self.points, self.plan, self.limits, self.requests, self.rng = points, plan, limits, requests, rng
        self.fit = self.prior = Fit.prior(roofline, points)
        self._schedules: dict[tuple[int, int], Sequence[Schedule]] = {}

    def goodputs(self, trials: Sequence[Trial]) -> np.ndarray:
        """Fit the trials; returns draws of the goodput with its slope, [points, draws]: 0 for settings that failed."""
        full: list[list[Samples]] = [[] for _ in self.points]
        measured = []
        for trial in trials:
            i = self.points.index(trial.point)
            if trial.samples is not None:
                share = trial.requests / self.requests
                measured.append(Measured(i, share, trial.samples, self.schedules(i, trial.requests)))
                if share == 1:
                    full[i].append(trial.samples)
        self.fit = fit(self.prior, measured, self.fit.mean)
        if any(s[0].arrivals is not None for s in self._schedules.values()):
            self._schedules = {}  # with arrivals the schedule depends on the times
        draws = self.fit.draws(DRAWS, self.rng)
        values = np.stack(
            [
                self.fit.goodput(i, self.schedules(i, self.requests), draws, full[i], self._score)
                for i in range(len(self.points))
            ]
        )
        values[[self.points.index(t.point) for t in trials if t.samples is None]] = 0.0
        return values

    def duration_s(self, i: int, requests: int) -> float:
        return self.fit.duration_s(i, self.schedules(i, requests))

    def grid_s(self, start_s: float) -> float:
        """The time of measuring every point at full length."""
        return sum(start_s + self.duration_s(i, self.requests) for i in range(len(self.points)))

    def schedules(self, i: int, requests: int) -> Sequence[Schedule]:
        if (i, requests) not in self._schedules:
            self._schedules[i, requests] = self.plan(self.points[i], requests, self.fit.step_time(i))
        return self._schedules[i, requests]

    def _score(self, ttft: np.ndarray, tpot: np.ndarray, rate: np.ndarray) -> np.ndarray:
        """The goodput, plus the slope that the module's text explains."""
        good: np.ndarray = np.ones(ttft.shape, dtype=bool)
        near: np.ndarray = np.ones(len(rate))
        for name, latency in (("ttft", ttft), ("tpot", tpot)):
            if name in self.limits:
                late = 1e3 * latency / self.limits[name]
                good &= late <= 1
                near *= np.minimum(1.0, 1 / np.maximum(late.mean(0), 1e-9))
        return np.asarray(rate * (good.mean(0) + SLOPE * near))
