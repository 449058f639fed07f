"""Recommend settings for a context, or refuse.

1. Refuse if the model does not beat the mean on held-out rows, or if context or latest rows are unlike the data.
2. Candidates: an even cover of the box, and variations of real runs; on the machine's steps.
3. Keep those inside the joint domain of the data that keep every limit with the asked probability.
4. Take the best lower bound, mean - 1.64 sd: the maximum of a prediction finds the model's errors.
5. Promise what rows that did not choose say: the mean less the over-promise seen between halves of the data.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bagu.errors import ArgumentError, UnknownName
from bagu.process.answer import Answer, Forecast, Recommendation, Refusal, Row
from bagu.process.candidates import EVEN, JITTER, VARIED, Box
from bagu.process.drift import drifted, recent_column
from bagu.process.run import Process
from bagu.process.table import Table
from bagu.process.target_model import Prediction

CAUTION = 1.64  # standard deviations of the lower bound: 95 % of a normal distribution
PROBABILITY = 0.95  # asked of every limit
POLISH = (0.04, 0.02, 0.01)  # widths of the variations around the best, as shares of a setting's range
CHOICES, MIN_DISTANCE = 3, 0.5  # recommendations, and the smallest distance between two of them (standard deviations)
OVER_ROWS = 1500  # candidates over which the halves choose
WIDER = 2.0  # radii of the domain within which an experiment is offered


def recommend(
    process: Process,
    given: Row,
    now: Row | None = None,
    moves: Mapping[str, float] | None = None,
    *,
    recent: Table | None = None,
    probability: float = PROBABILITY,
) -> Answer | Refusal:
    """The best settings in the context `given`, from the present settings `now` within `moves`. `recent` are the latest
    rows of the process, with or without results: the context comes from the last one, and drift is refused."""
    now, moves = now or {}, moves or {}
    context = full_context(process, given, recent)
    check_inputs(process, now | {n: now.get(n, 0.0) for n in moves if n not in now})
    drift = None if recent is None else drifted(process, recent)
    if (refusal := no_skill(process) or outside(process, context) or drift) is not None:
        return refusal
    box = Box(process, now, moves)
    if (refusal := _separated(process, box)) is not None:
        return refusal
    rng = np.random.default_rng(0)
    past = box.history()
    points = box.settled(np.vstack([past, box.even(EVEN), box.around(past, VARIED, JITTER, rng)]))
    search = _Search(process, box, context, probability)
    if not len(points) or not (search.inside(points) <= 1).any():
        return Refusal("nothing_inside", {})
    first = points
    for width in POLISH:
        kept, score = search.kept(points)
        if not len(kept):
            break
        points = np.vstack([kept, box.settled(box.around(kept[np.argsort(-score)[:20]], 400, width, rng))])
    kept, score = search.kept(points)
    if not len(kept):
        return Refusal("limits_unlikely", search.limit_facts(points))
    present = whatif(process, context | now) if len(now) == len(box.fields) else None
    chosen = _differing(process, box, kept, score, context)
    if present is not None and score.max() <= search.present(now):
        return Refusal("no_gain", {})
    over = over_promise(process, search.matrix(kept), score)
    made = tuple(_recommendation(process, box, point, context, now, over) for point in chosen)
    return Answer(context, made, present, *_best_run(process, context), search.wider(box, first, score.max()))


class _Search:
    """Scores of candidates in one context."""

    def __init__(self, process: Process, box: Box, context: Row, probability: float) -> None:
        self.process, self.box, self.context, self.probability = process, box, context, probability

    def matrix(self, points: np.ndarray) -> np.ndarray:
        return self.process.encoder.matrix(self.box.rows(points, self.context))

    def inside(self, points: np.ndarray) -> np.ndarray:
        return self.process.domain.distance(self.matrix(points))

    def kept(self, points: np.ndarray, radius: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """The candidates inside of the domain that keep the limits, and the lower bound of their merit."""
        points = points[self.inside(points) <= radius]
        if len(points) and (found := limit_probabilities(self.process, self.matrix(points))):
            points = points[np.min(list(found.values()), axis=0) >= self.probability]
        if not len(points):
            return points, np.empty(0)
        return points, lower_bound(self.process, self.process.goal.model.predict(self.matrix(points)))

    def present(self, now: Row) -> float:
        x = self.process.encoder.of_rows([{**self.context, **now}])
        return float(lower_bound(self.process, self.process.goal.model.predict(x))[0])

    def limit_facts(self, points: np.ndarray) -> dict[str, object]:
        near = self.matrix(points[self.inside(points) <= 1])
        worst = np.min(list(limit_probabilities(self.process, near).values()), axis=0)
        limits = ", ".join(limit.text for limit in self.process.limits)
        return {"limits": limits, "p": self.probability, "best": float(worst.max())}

    def wider(self, box: Box, points: np.ndarray, best: float) -> tuple[Row, float] | None:
        """A candidate farther from the data that may be better still."""
        far, score = self.kept(points, WIDER)
        if not len(far) or score.max() <= best:
            return None
        point = far[score.argmax()]
        if self.inside(point[None])[0] <= 1:
            return None
        return box.row(point), float(self.process.goal.model.predict(self.matrix(point[None])).mean[0])


def lower_bound(process: Process, found: Prediction) -> np.ndarray:
    return process.better * found.mean - CAUTION * found.sd


def limit_probabilities(process: Process, x: np.ndarray) -> dict[str, np.ndarray]:
    """The probability that a measured row keeps each limit of a target."""
    limits = [limit for limit in process.limits if limit.name in process.fits]
    found = {name: process.fits[name].model.predict(x) for name in {limit.name for limit in limits}}
    return {i.text: i.probability(found[i.name].mean, found[i.name].spread) for i in limits}


def over_promise(process: Process, x: np.ndarray, score: np.ndarray) -> float:
    """By how much the half of the rows that chose over-rates its choice against the other half; mean of ten pairs."""
    if len(x) > OVER_ROWS:
        x = x[np.argsort(-score)[:: max(1, len(x) // OVER_ROWS)]]
    gaps = []
    for pair in process.halves:
        found = [gp.mean_sd(x) for gp in pair]
        for (mean, sd), (other, _) in (found, found[::-1]):
            best = int((process.better * mean - CAUTION * sd).argmax())
            gaps.append(process.better * (mean[best] - other[best]))
    return max(float(np.mean(gaps)), 0.0)


def whatif(process: Process, row: Row, over: float = 0.0) -> Forecast:
    """The prediction of one row, less the over-promise of the search that chose it."""
    x = process.encoder.of_rows([row])
    found = process.goal.model.predict(x)
    shift = -process.better * over
    mean = float(found.mean[0]) + shift
    far = process.encoder.fields[int(process.encoder.owner[process.domain.farthest_input(x[0])])].name
    return Forecast(
        mean,
        mean - process.better * CAUTION * float(found.sd[0]),
        float(found.low[0]) + shift,
        float(found.high[0]) + shift,
        {t: float(p[0]) for t, p in limit_probabilities(process, x).items()},
        float(process.domain.distance(x)[0]),
        far,
    )


def full_context(process: Process, given: Row, recent: Table | None = None) -> Row:
    """The context with every column; one that is not given takes the value of the last row."""
    check_inputs(process, given)
    found: Row = {}
    for f in process.encoder.fields:
        if f.role == "context":
            column = process.table[f.name] if recent is None else recent_column(process, recent, f.name)
            value = given.get(f.name, column.values[-1])
            found[f.name] = str(value) if f.levels else float(value)
    return found


def check_inputs(process: Process, row: Row) -> None:
    """Raise for a name that is no input, and for a value that is no number where one is needed."""
    fields = {f.name: f for f in process.schema.inputs}
    for name, value in row.items():
        UnknownName.check("setting or context", name, fields)
        if fields[name].kind == "number" and not isinstance(value, int | float):
            raise ArgumentError(f"{name} is {str(value)[:40]!r}", hint="give a number")


def no_skill(process: Process) -> Refusal | None:
    skill = process.goal.skill
    if skill.bound > 0:
        return None
    return Refusal("no_skill", {"target": process.goal.name, "r2": skill.r2, "bound": skill.bound})


def outside(process: Process, context: Row) -> Refusal | None:
    """A refusal if the context is unlike the data: an unseen level, or far from every run."""
    for f in process.encoder.fields:
        if f.role == "context" and f.levels and context[f.name] not in f.levels:
            known = ", ".join(f.levels[:8])
            return Refusal("unseen_level", {"column": f.name, "value": str(context[f.name])[:40], "known": known})
    columns = process.context_columns
    if not len(columns):
        return None
    settings = {f.name: f.levels[0] if f.levels else 0.0 for f in process.encoder.fields if f.role == "setting"}
    x = process.encoder.of_rows([{**settings, **context}])[0, columns]
    if process.context_domain.distance(x[None])[0] <= 1:
        return None
    centre = np.median(process.x[:, columns], 0)
    far = process.encoder.fields[int(process.encoder.owner[columns[np.abs(x - centre).argmax()]])]
    data = process.rows[far.name].values
    low, high = (f"{v:.4g}" for v in (np.nanmin(data), np.nanmax(data))) if not far.levels else ("", "")
    value = context[far.name]
    shown = value if isinstance(value, str) else f"{value:.4g}"
    return Refusal("context_outside", {"column": far.name, "value": shown, "low": low, "high": high})


def _separated(process: Process, box: Box) -> Refusal | None:
    """A refusal if settings that never moved apart are asked to: one may move now, and the other not."""
    widths = {f.name: box.high[i] - box.low[i] for i, f in enumerate(box.fields)}
    for a, b, r in process.tied:
        if a in widths and b in widths and (widths[a] > 0) != (widths[b] > 0):
            return Refusal("never_apart", {"column": a, "other": b, "r": r})
    return None


def _differing(process: Process, box: Box, points: np.ndarray, score: np.ndarray, context: Row) -> list[np.ndarray]:
    """The best candidates that differ from each other."""
    x = process.encoder.matrix(box.rows(points, context))
    picked: list[int] = []
    for i in np.argsort(-score, kind="stable"):
        if all(np.linalg.norm(x[i] - x[j]) >= MIN_DISTANCE for j in picked):
            picked.append(int(i))
        if len(picked) == CHOICES:
            break
    return [points[i] for i in picked]


def _recommendation(
    process: Process, box: Box, point: np.ndarray, context: Row, now: Row, over: float
) -> Recommendation:
    settings = box.row(point)
    row = settings | context
    x = process.encoder.of_rows([row])[0]
    names = [c.name for c in process.table.columns if c.kind != "time"]
    nearest = tuple({n: _plain(process.rows[n].values[i]) for n in names} for i in process.domain.nearest(x, 3))
    moves = {n: float(v) - float(now[n]) for n, v in settings.items() if n in now and not isinstance(v, str)}
    return Recommendation(settings, whatif(process, row, over), moves, nearest, _sensitivity(process, row))


def _sensitivity(process: Process, row: Row) -> dict[str, float]:
    found = {}
    for f, scale in zip(process.encoder.fields, process.encoder.scale, strict=True):
        if f.role == "setting" and not f.levels:
            ends = [row | {f.name: float(row[f.name]) + side * 0.5 * float(scale)} for side in (-1, 1)]
            low, high = process.goal.model.predict(process.encoder.of_rows(ends)).mean
            found[f.name] = float(high - low)
    return found


def _best_run(process: Process, context: Row) -> tuple[Row, float]:
    """The best measured row that kept the limits, and what the model says of its settings in this context."""
    kept = np.ones(len(process.y), bool)
    for limit in process.limits:
        values = process.rows[limit.name].values
        kept &= values >= limit.bound if limit.above else values <= limit.bound
    best = int(np.where(kept, process.better * process.y, -np.inf).argmax())
    names = [c.name for c in process.table.columns if c.kind != "time"]
    row = {n: _plain(process.rows[n].values[best]) for n in names}
    settings = {f.name: row[f.name] for f in process.encoder.fields if f.role == "setting"}
    return row, whatif(process, settings | context).mean


def _plain(value: object) -> float | str:
    return str(value) if isinstance(value, str) else float(value)  # type: ignore[arg-type]
