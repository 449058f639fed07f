"""What a plant's operators would leave behind: a log of runs around their habits, with noise."""

from __future__ import annotations

import csv
import datetime
import io
from dataclasses import dataclass, replace

import numpy as np

from bagu.process.plants.plant import Plant
from bagu.process.schema import Field, Schema
from bagu.process.table import Column, Table

START = datetime.datetime(2025, 1, 6, 6, 0)
HABIT = 0.12  # spread of the settings around the habit, as a share of their range
BATCH = 5  # runs of a batch; it has one context
NOISE = 0.2  # of the target, as a share of its spread over the whole box
LIMIT_NOISE = 0.05  # of the limited quantities


@dataclass(frozen=True)
class History:
    """`x` and `c` as shares of their ranges (plant.py), `table` and `schema` as a user would have them."""

    plant: Plant
    x: np.ndarray
    c: np.ndarray
    table: Table
    schema: Schema
    home: np.ndarray
    slope: np.ndarray

    def first(self, rows: int) -> History:
        """The history up to a row; what comes after can judge a model of it."""
        return replace(self, x=self.x[:rows], c=self.c[:rows], table=self.table.take(np.arange(rows)))

    def operators(self, c: np.ndarray, *, runs: int = 400) -> float:
        """The mean merit of the operators in one context."""
        rng = np.random.default_rng(2)
        centre = self.home + (c - 0.5) @ self.slope
        x = np.clip(centre + HABIT * rng.standard_normal((runs, len(centre))), 0, 1)
        return float(self.plant.merit(x, np.repeat(c[None], runs, 0)).mean())

    def best_row(self) -> np.ndarray:
        """The settings of the best measured row that keeps the limits as measured."""
        value = self.table[self.plant.target].values * (1 if self.plant.goal == "max" else -1)
        kept = np.ones(len(value), bool)
        for limit in self.plant.limits:
            measured = self.table[limit.name].values
            kept &= measured >= limit.bound if limit.above else measured <= limit.bound
        return self.x[np.where(kept, value, -np.inf).argmax()]


def history(plant: Plant, rows: int, seed: int, *, noise: float = NOISE, batches: bool = False) -> History:
    """A history of the plant. The operators have a habit, follow the contexts a little, and vary around it."""
    rng = np.random.default_rng(seed)
    d, k = len(plant.settings), len(plant.contexts)
    home, slope = 0.3 + 0.4 * rng.random(d), 0.3 * rng.standard_normal((k, d))
    c = rng.beta(2, 2, (rows, k))
    if batches:
        c = np.repeat(c[: -(-rows // BATCH)], BATCH, 0)[:rows]
    x = np.clip(home + (c - 0.5) @ slope + HABIT * rng.standard_normal((rows, d)), 0, 1)
    found = plant.truth(x, c)
    share = {name: noise if name == plant.target else min(noise, LIMIT_NOISE) for name in found}
    measured = {
        name: values + share[name] * plant.spread[name] * rng.standard_normal(rows) for name, values in found.items()
    }
    first = (START - datetime.datetime(1970, 1, 1)).total_seconds()
    stamps = Column(name="stamp", kind="time", values=first + 3600.0 * np.arange(rows))
    batch = Column(name="batch", kind="category", values=np.array([f"B{i // BATCH:04d}" for i in range(rows)]))
    inputs = [
        Column(name=i.name, kind="number", values=values, unit=i.unit)
        for i, values in zip((*plant.settings, *plant.contexts), plant.units(x, c).values(), strict=True)
    ]
    units = {plant.target: plant.unit} | {limit.name: limit.unit for limit in plant.limits}
    results = [Column(name=n, kind="number", values=v, unit=units[n]) for n, v in measured.items()]
    table = Table(columns=(*([stamps, batch] if batches else []), *inputs, *results))
    return History(plant, x, c, table, _schema(plant, batches), home, slope)


def _schema(plant: Plant, batches: bool) -> Schema:
    settings = [Field(name=i.name, role="setting", unit=i.unit, low=i.low, high=i.high) for i in plant.settings]
    contexts = [Field(name=i.name, role="context", unit=i.unit) for i in plant.contexts]
    targets = [Field(name=plant.target, role="target", unit=plant.unit, goal=plant.goal)]
    targets += [Field(name=limit.name, role="target", unit=limit.unit) for limit in plant.limits]
    order = [Field(name="stamp", role="time", kind="time"), Field(name="batch", role="group", kind="category")]
    return Schema(
        columns=(*(order if batches else []), *settings, *contexts, *targets),
        limits=tuple(limit.text for limit in plant.limits),
    )


def csv_text(table: Table) -> str:
    """The table as CSV. A text cell that a spreadsheet would run as a formula gets an apostrophe before it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([f"{c.name} [{c.unit}]" if c.unit else c.name for c in table.columns])
    for row in zip(*(map(_cell, [c.kind] * table.rows, c.values) for c in table.columns), strict=True):
        writer.writerow(row)
    return out.getvalue()


def _cell(kind: str, value: float | str) -> str:
    if kind == "category":
        return f"'{value}" if str(value).startswith(("=", "+", "-", "@", "\t", "\r")) else str(value)
    if np.isnan(value):
        return ""
    if kind == "time":
        return (datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=float(value))).isoformat(" ")
    return f"{value:.6g}"
