"""Recommendations scored against a plant whose truth is known: gain, harm, promise, limits, refusals, coverage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bagu.process.answer import Answer
from bagu.process.candidates import Box
from bagu.process.drift import drifted
from bagu.process.plants import plant as named_plant
from bagu.process.plants.history import NOISE, History, history
from bagu.process.plants.plant import Plant
from bagu.process.recommend import full_context, no_skill, outside, recommend
from bagu.process.run import Process, fit_process
from bagu.process.table import Column, Table

LATER = 200  # rows after the history that judge intervals and refusals
RECENT = 10  # rows of the log that come with a question
SHIFT = 3.0  # standard deviations of one context, of the shifted process


def measure(
    name: str, seed: int, *, rows: int = 200, noise: float = NOISE, contexts: int = 6, models: Sequence[str] = ()
) -> dict[str, Any]:
    """One history of a plant: a fit, recommendations in contexts of the data, and what the truth says of them. Gains
    are shares: 0 is the operators' mean in that context, 1 the optimum."""
    plant = named_plant(name)
    whole = history(plant, rows + LATER, seed, noise=noise)
    past = whole.first(rows)
    process = fit_process(past.table, past.schema, models=models, minutes=10)
    rng = np.random.default_rng(seed)
    cases = [case(plant, past, process, past.c[i]) for i in rng.integers(rows, size=contexts)]
    shuffled = replace(past, table=_shuffled(past, plant, rng))
    blind = fit_process(shuffled.table, shuffled.schema, models=models, minutes=10)
    return {
        "plant": name,
        "seed": seed,
        "rows": rows,
        "noise": noise,
        "models": list(models),
        "cases": cases,
        "coverage": _coverage(plant, whole, process, rows),
        "own_coverage": process.goal.coverage,
        **refusals(process, plant, past.c, whole.c[rows:]),
        "blind_recommended": no_skill(blind) is None,
        "weights": dict(process.goal.model.weights),
    }


def case(plant: Plant, past: History, process: Process, c: np.ndarray) -> dict[str, float | bool | None]:
    """One context: the recommendation, the best row and the maximum of the prediction, each against the truth."""
    operators, best = past.operators(c), plant.optimum(c)[1]
    span = best - operators

    def gain(x: np.ndarray) -> float:
        return float(plant.merit(x[None], c[None])[0] - operators) / span

    given = context_row(plant, c)
    found = recommend(process, given)
    maximum, said = _maximum(process, plant, given)
    row: dict[str, float | bool | None] = {
        "best_row": gain(past.best_row()),
        "maximum": gain(maximum),
        "maximum_over": (process.better * said - _value(plant, process, maximum, c)) / span,
        "gain": None,
    }
    if not isinstance(found, Answer):
        return row
    first = found.choices[0]
    x = shares(plant, first.settings)
    value, truth = _value(plant, process, x, c), plant.truth(x[None], c[None])
    kept = [(truth[i.name][0] >= i.bound) if i.above else (truth[i.name][0] <= i.bound) for i in plant.limits]
    return row | {
        "gain": gain(x),
        "over": (process.better * first.forecast.mean - value) / span,
        "above": bool(value >= process.better * first.forecast.promise),
        "kept": bool(all(kept)),
    }


def context_row(plant: Plant, c: np.ndarray) -> dict[str, float | str]:
    return {i.name: float(i.low + v * (i.high - i.low)) for i, v in zip(plant.contexts, c, strict=True)}


def shares(plant: Plant, settings: Any) -> np.ndarray:
    return np.array([(settings[i.name] - i.low) / (i.high - i.low) for i in plant.settings])


def _value(plant: Plant, process: Process, x: np.ndarray, c: np.ndarray) -> float:
    return process.better * float(plant.truth(x[None], c[None])[plant.target][0])


def _maximum(process: Process, plant: Plant, given: Any) -> tuple[np.ndarray, float]:
    """The rule of commercial tools: the largest prediction in the box."""
    box = Box(process, {}, {})
    points = box.even(5000)
    mean = process.goal.model.predict(process.encoder.matrix(box.rows(points, full_context(process, given)))).mean
    best = int((process.better * mean).argmax())
    return shares(plant, box.row(points[best])), float(mean[best])


def refusals(process: Process, plant: Plant, past: np.ndarray, later: np.ndarray) -> dict[str, float]:
    """Shares of refused rows of the same process and of one whose first context moved. `_shifted` and `_same` have the
    rows before them at hand, as a user with a log has; `_row_` have one row alone; `delay` counts the rows after the
    change until the refusal stands."""
    moved = later.copy()
    moved[:, 0] += SHIFT * past[:, 0].std()
    far = later.copy()
    far[:, 0] = past[:, 0].mean() + SHIFT * past[:, 0].std()

    def alone(rows: np.ndarray) -> np.ndarray:
        return np.array([outside(process, context_row(plant, c)) is not None for c in rows])

    def with_log(before: np.ndarray, rows: np.ndarray) -> np.ndarray:
        every = np.vstack([before[-RECENT + 1 :], rows])
        seen = [drifted(process, _log(plant, every[i : i + RECENT])) is not None for i in range(len(rows))]
        return alone(rows) | np.array(seen)

    changing = with_log(past, moved)
    return {
        "refused_row_same": float(alone(later).mean()),
        "refused_same": float(with_log(past, later).mean()),
        "refused_row_shifted": float(alone(moved).mean()),
        "refused_shifted": float(with_log(moved[: RECENT - 1], moved[RECENT - 1 :]).mean()),
        "refused_row_far": float(alone(far).mean()),
        "delay": 0 if changing.all() else int(np.flatnonzero(~changing).max()) + 1,
    }


def _log(plant: Plant, c: np.ndarray) -> Table:
    values = plant.units(np.zeros((len(c), len(plant.settings))), c)
    return Table(columns=tuple(Column(name=i.name, kind="number", values=values[i.name]) for i in plant.contexts))


def _coverage(plant: Plant, whole: History, process: Process, rows: int) -> float:
    later = whole.table.take(np.arange(rows, whole.table.rows))
    found = process.goal.model.predict(process.encoder.of_table(later))
    y = later[plant.target].values
    return float(((y >= found.low) & (y <= found.high)).mean())


def _shuffled(past: History, plant: Plant, rng: np.random.Generator) -> Any:
    columns = tuple(
        replace(c, values=rng.permutation(c.values)) if c.name == plant.target else c for c in past.table.columns
    )
    return replace(past.table, columns=columns)
