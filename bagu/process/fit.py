"""Fit the models of every target under a time budget, judge them on held-out rows, and set their interval.

`fit_target` is the centre: each model predicts rows that it has not seen, an ensemble is weighed on those, the
interval is set and its coverage checked. A finished model is written at once, so that a killed fit resumes with
the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from bagu.errors import BaguError
from bagu.machine.terminal import counted
from bagu.process.encode import Encoder
from bagu.process.health import MOST_FITTED, time_order
from bagu.process.models import trees
from bagu.process.models.gp import GP
from bagu.process.models.mlp import Mlp
from bagu.process.models.ridge import Mean, Ridge
from bagu.process.schema import Schema
from bagu.process.splits import Split, Splits, make_splits
from bagu.process.table import Table
from bagu.process.target_model import FEWEST as FEWEST_OF_GROUP
from bagu.process.target_model import (
    Model,
    TargetModel,
    conformal_quantile,
    error_weights,
    greedy_weights,
    level_quantiles,
    row_quantiles,
)

KINDS: dict[str, Callable[[dict[str, np.ndarray]], Model]] = {
    "mean": Mean.from_arrays,
    "ridge": Ridge.from_arrays,
    "gp": GP.from_arrays,
    "trees": trees.Trees.from_arrays,
    "mlp": Mlp.from_arrays,
}
SKILL_Z = 3.0  # standard errors by which the model must beat the mean: no shuffled target in 50 may pass
FEWEST = 10  # rows
SHARED = 100  # rows from which on the folds share the hyperparameters of the Gaussian process
GREEDY = 100  # rows from which on the weights of the ensemble are greedy


@dataclass(frozen=True)
class Fitted:
    """One model on all rows, and its predictions of the rows of each split by models that had not seen them."""

    model: Model
    held_out: Mapping[str, np.ndarray]  # by split; NaN for rows that are never tested
    spread: Mapping[str, np.ndarray] = field(default_factory=dict)  # of a measured row, from the GP


@dataclass(frozen=True)
class Score:
    """Of held-out rows. `bound` is the R² that is shown: the squared error saved, less SKILL_Z standard errors."""

    split: str
    rmse: float
    r2: float
    bound: float


@dataclass(frozen=True)
class TargetFit:
    name: str
    model: TargetModel
    scores: Mapping[str, tuple[Score, ...]]  # by model, and "ensemble"
    coverage: float  # of the interval on held-out rows
    by_group: Mapping[str, float]  # coverage of the groups and levels of 30 or more held-out rows
    over_time: tuple[float, ...]  # coverage of the forward blocks
    left_out: Mapping[str, str]  # models without a result, and why (a key of words.py)

    @property
    def skill(self) -> Score:
        return self.scores["ensemble"][0]


Load = Callable[[str], Fitted | None]
Save = Callable[[str, Fitted], None]


def prepare(table: Table, schema: Schema, target: str) -> tuple[Table, np.ndarray]:
    """The rows with a target, in an order that does not depend on the file: by target, then by the inputs. Of more than
    MOST_FITTED rows, every n-th in time order."""
    kept = table.take(np.flatnonzero(np.isfinite(table[target].values)))
    if kept.rows > MOST_FITTED:
        kept = kept.take(time_order(kept, schema)[np.linspace(0, kept.rows - 1, MOST_FITTED).astype(int)])
    if kept.rows < FEWEST:
        raise BaguError(f"{target} has {counted(kept.rows, 'row')} with a value", hint=f"at least {FEWEST} are needed")
    y = kept[target].values
    if y.std() == 0:
        raise BaguError(f"{target} is constant", hint="give a target that varies")
    inputs = [kept[f.name].values for f in reversed(schema.inputs)]
    order = np.lexsort([*inputs, y])
    return kept.take(order), y[order]


def fit_target(
    table: Table,
    schema: Schema,
    encoder: Encoder,
    target: str,
    *,
    models: tuple[str, ...],
    deadline: float,
    load: Load = lambda name: None,
    save: Save = lambda name, fitted: None,
) -> TargetFit:
    """Fit the `models` of one target. `load` returns a model that an earlier, killed fit has finished."""
    rows, y = prepare(table, schema, target)
    x, splits = encoder.of_table(rows), make_splits(rows, schema)
    every = {s.name: s for s in (splits.honest, splits.calibrate, splits.plain)}
    names = list(dict.fromkeys(("mean", "ridge", "gp", *models)))
    done = {name: fitted for name in names if (fitted := load(name)) is not None}
    left_out = {}
    with ThreadPoolExecutor(1) as pool:  # the trees' child process has a core of its own, so they are awaited last
        missing = sorted((name for name in names if name not in done), key="trees".__eq__)
        asked = x, y, encoder.signs, every, deadline
        beside = pool.submit(_fit_one, "trees", *asked) if "trees" in missing else None
        for name in missing:
            made = beside.result() if beside and name == "trees" else _fit_one(name, *asked)
            if isinstance(made, str):
                left_out[name] = made
                continue
            save(name, made)
            done[name] = made
    done = {name: done[name] for name in names if name in done}
    return _joined(target, rows, schema, x, y, encoder, splits, done, left_out)


def _fit_one(
    name: str, x: np.ndarray, y: np.ndarray, signs: np.ndarray, splits: Mapping[str, Split], deadline: float
) -> Fitted | str:
    """The model, or why there is none (a key of words.py)."""
    left = deadline - time.monotonic()
    if name in ("trees", "mlp") and left <= 0:
        return "no_time"
    if name == "trees":
        if not trees.offered():
            return "no_lightgbm"
        sets = [np.arange(len(y)), *(train for s in splits.values() for train, _ in s.folds)]
        made = trees.fit_trees(x, y, signs, sets, seconds=left)
        if made is None:
            return "time_ended"
        rest = iter(made[1:])
        return Fitted(made[0], {n: _held_out(x, y, s, lambda *_: next(rest)) for n, s in splits.items()})
    if name == "gp":
        gp = GP.fit(x, y)
        found = {n: _held_out_gp(gp, x, y, s) for n, s in splits.items()}
        return Fitted(gp, {n: f[0] for n, f in found.items()}, {n: f[1] for n, f in found.items()})
    kinds: dict[str, Callable[[np.ndarray, np.ndarray], Model]] = {"mean": Mean.fit, "ridge": Ridge.fit, "mlp": Mlp.fit}

    def fit(rows: np.ndarray, target: np.ndarray) -> Model:
        if name == "mlp" and time.monotonic() > deadline:
            raise TimeoutError
        return kinds[name](rows, target)

    try:
        return Fitted(fit(x, y), {n: _held_out(x, y, s, fit) for n, s in splits.items()})
    except TimeoutError:
        return "time_ended"


def _held_out(x: np.ndarray, y: np.ndarray, split: Split, fit: Callable[[np.ndarray, np.ndarray], Model]) -> np.ndarray:
    found = np.full(len(y), np.nan)
    for train, test in split.folds:
        found[test] = fit(x[train], y[train]).predict(x[test])
    return found


def _held_out_gp(gp: GP, x: np.ndarray, y: np.ndarray, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Means and spreads. The hyperparameters are those of all rows; few rows have them searched in each fold, where the
    rows that are held out would move them and the model would look better than it is."""
    mean, spread = np.full(len(y), np.nan), np.full(len(y), np.nan)
    for train, test in split.folds:
        fold = gp.on(x[train], y[train]) if len(y) >= SHARED else GP.fit(x[train], y[train])
        mean[test], sd = fold.mean_sd(x[test])
        spread[test] = np.hypot(sd, fold.noise)
    return mean, spread


def _joined(
    target: str,
    rows: Table,
    schema: Schema,
    x: np.ndarray,
    y: np.ndarray,
    encoder: Encoder,
    splits: Splits,
    done: Mapping[str, Fitted],
    left_out: Mapping[str, str],
) -> TargetFit:
    """The ensemble, its interval and its scores."""
    honest = splits.honest.name
    tested = np.isfinite(done["mean"].held_out[honest])
    weigh = greedy_weights if len(y) >= GREEDY else error_weights
    weights = weigh({n: f.held_out[honest][tested] for n, f in done.items() if n != "mean"}, y[tested])
    joined = {
        s: sum((weights[n] * done[n].held_out[s] for n in weights if weights[n] > 0), np.zeros(len(y)))
        for s in done["mean"].held_out
    }
    cal = splits.calibrate.name
    disagreement = sum(
        (weights[n] * (done[n].held_out[cal] - joined[cal]) ** 2 for n in weights if weights[n] > 0), 0.0
    )
    spread = np.sqrt(done["gp"].spread[cal] ** 2 + disagreement)
    ratio = np.abs(y - joined[cal]) / spread
    covered = np.zeros(len(y), bool)
    for _, test in splits.calibrate.folds:  # the quantile of a fold comes from the others
        others = np.setdiff1d(splits.calibrate.tested, test)
        levels = level_quantiles(x[others], ratio[others], encoder.categories)
        covered[test] = ratio[test] <= row_quantiles(x[test], conformal_quantile(ratio[others]), levels)
    model = TargetModel(
        {n: f.model for n, f in done.items()},
        weights,
        conformal_quantile(ratio),
        level_quantiles(x, ratio, encoder.categories),
        encoder.signs,
        x.min(0),
        x.max(0),
    )
    scores = {
        name: tuple(_score(s, y, held[s], done["mean"].held_out[s]) for s in dict.fromkeys((honest, cal, "random")))
        for name, held in {**{n: f.held_out for n, f in done.items()}, "ensemble": joined}.items()
    }
    forward: tuple[float, ...] = ()
    if honest == "forward":
        ratios = np.abs(y - joined[honest]) / np.sqrt(done["gp"].spread[honest] ** 2)
        widths = row_quantiles(x, model.quantile, model.levels)
        forward = tuple(float((ratios[test] <= widths[test]).mean()) for _, test in splits.honest.folds)
    return TargetFit(
        target,
        model,
        scores,
        float(covered[splits.calibrate.tested].mean()),
        _by_group(rows, schema, covered),
        forward,
        left_out,
    )


def _score(split: str, y: np.ndarray, found: np.ndarray, baseline: np.ndarray) -> Score:
    kept = np.isfinite(found)
    error, plain = (y[kept] - found[kept]) ** 2, (y[kept] - baseline[kept]) ** 2
    saved = plain - error
    bound = saved.mean() - SKILL_Z * saved.std() / np.sqrt(len(saved))
    return Score(split, float(np.sqrt(error.mean())), float(saved.mean() / plain.mean()), float(bound / plain.mean()))


def _by_group(rows: Table, schema: Schema, covered: np.ndarray) -> dict[str, float]:
    found = {}
    for name in [f.name for f in (*schema.of("group"), *(f for f in schema.inputs if f.levels))]:
        labels, counts = np.unique(rows[name].values, return_counts=True)
        for label in labels[counts >= FEWEST_OF_GROUP]:
            found[f"{name} {label}"] = float(covered[rows[name].values == label].mean())
    return found
