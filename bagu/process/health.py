"""What is wrong with the data, said before anything is fitted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from bagu.process.schema import Field, Schema
from bagu.process.table import Column, Table
from bagu.process.words import Lang, say

Level = Literal["error", "warning", "note"]
MOST_FITTED = 10_000  # rows that models are fitted on; distances between all pairs are needed
LEAK, TOGETHER = 0.995, 0.98  # rank correlations
CHANGES = (  # of a unit: after = factor * before + offset
    ("°C to °F", 1.8, 32.0), ("°F to °C", 1 / 1.8, -32 / 1.8), ("°C to K", 1.0, 273.15), ("K to °C", 1.0, -273.15),
    ("in to mm", 25.4, 0.0), ("mm to in", 1 / 25.4, 0.0), ("bar to psi", 14.504, 0.0), ("psi to bar", 1 / 14.504, 0.0),
    ("× 1000", 1000.0, 0.0), ("÷ 1000", 1e-3, 0.0), ("× 100", 100.0, 0.0), ("÷ 100", 0.01, 0.0), ("× 10", 10.0, 0.0),
    ("÷ 10", 0.1, 0.0),
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    kind: str
    level: Level
    facts: dict[str, Any] = field(default_factory=dict)

    def words(self, lang: Lang = "en") -> str:
        return say(self.kind, self.facts, lang)


def examine(table: Table, schema: Schema) -> list[Finding]:
    """The findings, errors first."""
    ordered = table.take(time_order(table, schema))
    found = [*_whole(ordered, schema), *(Finding("note", "note", {"text": note}) for note in table.notes)]
    used = [f for f in schema.columns if f.role in ("setting", "context", "target")]
    for spec in used:
        found += _one(ordered[spec.name], spec, ordered.rows)
    targets = [f for f in schema.of("target") if f.kind == "number"]
    if targets:
        goal = next((f for f in targets if f.goal != "none"), targets[0])
        found += _against(ordered, schema, goal)
    found += _pairs(ordered, schema)
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.level])


def time_order(table: Table, schema: Schema) -> np.ndarray:
    """Row numbers by time, or in file order without a time; rows without a time come last."""
    stamps = schema.of("time")
    return np.argsort(table[stamps[0].name].values, kind="stable") if stamps else np.arange(table.rows)


def _whole(table: Table, schema: Schema) -> Iterator[Finding]:
    if table.rows > MOST_FITTED:
        yield Finding("many_rows", "note", {"n": table.rows, "most": MOST_FITTED})
    if table.rows < 30:
        yield Finding("few_rows", "error" if table.rows < 10 else "warning", {"n": table.rows})
    codes = np.column_stack([np.unique(c.values, return_inverse=True)[1] for c in table.columns])
    if copies := table.rows - len(np.unique(codes, axis=0)):
        yield Finding("duplicates", "warning", {"n": copies})
    inputs = [table.names.index(f.name) for f in schema.inputs]
    if inputs and not schema.of("group"):
        share = 1 - len(np.unique(codes[:, inputs], axis=0)) / table.rows
        if share > 0.2:
            yield Finding("repeats", "warning", {"share": share})


def _one(column: Column, spec: Field, rows: int) -> Iterator[Finding]:
    name, absent = column.name, column.missing
    if absent.mean() > 0.02:
        yield Finding("missing", "warning" if absent.mean() > 0.2 else "note", {"column": name, "share": absent.mean()})
    if column.other_units:
        yield Finding("mixed_units", "error", {"column": name, "units": ", ".join((column.unit, *column.other_units))})
    filled = column.values[~absent]
    if len(np.unique(filled)) <= 1:
        yield Finding("constant", "error" if spec.role == "target" else "warning", {"column": name})
        return
    if column.kind == "category":
        return
    start, length = _longest_run(column.values)
    usual = len(filled) / len(np.unique(filled))  # rows per value: a setting or a batch repeats its value by nature
    if usual < 10 and length >= max(8, rows // 20, 6 * usual):
        yield Finding("stuck", "warning", {"column": name, "n": length, "row": start + 1})
    low, middle, high = np.quantile(filled, [0.25, 0.5, 0.75])
    far = int((np.abs(filled - middle) > 8 * (high - low)).sum()) if high > low else 0
    if far:
        yield Finding("outliers", "warning", {"column": name, "n": far})
    if (jump := _unit_jump(column.values)) is not None:
        yield Finding("unit_jump", "error", {"column": name, "row": jump[0] + 1, "change": jump[1]})


def _against(table: Table, schema: Schema, goal: Field) -> Iterator[Finding]:
    y = table[goal.name].values
    if np.nanstd(y) == 0 or np.isfinite(y).sum() < 10:
        return
    late = np.arange(len(y)) >= 0.7 * len(y)
    shift = (np.nanmean(y[late]) - np.nanmean(y[~late])) / np.nanstd(y[~late]) if np.nanstd(y[~late]) else 0.0
    if schema.of("time") and abs(shift) > 0.8:
        yield Finding("drift", "warning", {"target": goal.name, "shift": abs(shift)})
    for spec in schema.inputs:
        column = table[spec.name]
        facts = {"column": spec.name, "target": goal.name}
        absent = column.missing
        if 8 <= absent.sum() <= len(y) - 8:
            difference = (np.nanmean(y[absent]) - np.nanmean(y[~absent])) / np.nanstd(y)
            if abs(difference) * np.sqrt(absent.sum()) > 4:
                yield Finding("missing_with_target", "warning", {**facts, "shift": abs(difference)})
        if spec.kind != "number":
            continue
        r = correlation(column.values, y)
        if abs(r) > LEAK:
            yield Finding("leak", "error", {**facts, "r": r})
            continue
        for lag in (1, 2, 3):
            if abs(back := correlation(column.values[lag:], y[:-lag])) > LEAK:
                yield Finding("lagged", "error", {**facts, "r": back, "n": lag})
                break
        else:
            before = correlation(column.values[1:], y[:-1])
            if spec.role == "setting" and schema.of("time") and abs(before) > max(0.3, abs(r) + 0.15):
                yield Finding("reverse", "warning", {**facts, "r": before})


def _pairs(table: Table, schema: Schema) -> Iterator[Finding]:
    for a, b, r in moved_together(table, schema):
        yield Finding("together", "warning", {"column": a, "other": b, "r": r})


def moved_together(table: Table, schema: Schema) -> list[tuple[str, str, float]]:
    """Pairs of settings whose values are nearly the same function of each other, with their correlation."""
    names = [f.name for f in schema.of("setting") if f.kind == "number"][:200]
    if len(names) < 2:
        return []
    values = np.column_stack([table[name].values for name in names])
    full = values[np.isfinite(values).all(1)]
    if len(full) < 10:
        return []
    moving = full.std(0) > 0
    r = np.corrcoef((full[:, moving] - full[:, moving].mean(0)).T).reshape(int(moving.sum()), -1)
    kept = [name for name, moves in zip(names, moving, strict=True) if moves]
    pairs = zip(*np.nonzero(np.triu(np.abs(r) > TOGETHER, 1)), strict=True)
    return [(kept[i], kept[j], float(r[i, j])) for i, j in pairs]


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """The rank correlation of the rows that have both; 0 if there are fewer than ten."""
    both = np.isfinite(a) & np.isfinite(b)
    if both.sum() < 10 or np.ptp(a[both]) == 0 or np.ptp(b[both]) == 0:
        return 0.0
    ranks = [np.unique(v[both], return_inverse=True)[1].astype(float) for v in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _longest_run(values: np.ndarray) -> tuple[int, int]:
    """Start and length of the longest run of equal values."""
    edges = np.flatnonzero(np.r_[True, values[1:] != values[:-1], True])
    lengths = np.diff(edges)
    at = int(lengths.argmax())
    return int(edges[at]), int(lengths[at])


def _unit_jump(values: np.ndarray) -> tuple[int, str] | None:
    """The row and the change where a column continues in another unit: one cut explains nearly all of its variance, and
    the conversion brings level and spread of the two sides together."""
    at = np.flatnonzero(np.isfinite(values))
    v = values[at]
    n = len(v)
    if n < 20:
        return None
    sums = np.cumsum(v)[:-1]
    size = np.arange(1, n)
    between = (sums - size * v.mean()) ** 2 * n / (size * (n - size))  # sum of squares between the sides of each cut
    inner = between[4:-5]
    cut = int(inner.argmax()) + 5
    if inner.max() < 0.75 * ((v - v.mean()) ** 2).sum():
        return None
    before, after = v[:cut], v[cut:]
    for words, factor, offset in CHANGES:
        scale = max(np.std(before) * factor, 1e-12)
        same_level = abs(np.median(after) - (factor * np.median(before) + offset)) < 1.0 * scale
        spread = np.std(after) / scale
        if same_level and (0.5 < spread < 2.0):
            return int(at[cut]), words
    return None
