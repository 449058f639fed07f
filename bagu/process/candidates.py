"""Settings to consider: an even cover of the allowed box, and variations of runs that happened."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bagu.errors import ArgumentError
from bagu.process.answer import Row
from bagu.process.run import Process
from bagu.process.schema import Field

EVEN, VARIED = 2500, 2500
JITTER = 0.08  # of a setting's range


class Box:
    """The settings that may be chosen: bounds, limits on settings and moves from the present values, in units."""

    def __init__(self, process: Process, now: Row, moves: Mapping[str, float]) -> None:
        self.process = process
        self.fields = [process.schema[f.name] for f in process.encoder.fields if f.role == "setting"]
        if not self.fields:
            raise ArgumentError(
                "no setting varies in the data", hint="settings that never changed cannot be recommended"
            )
        self.low, self.high = np.empty(len(self.fields)), np.empty(len(self.fields))
        for i, f in enumerate(self.fields):
            self.low[i], self.high[i] = _bounds(process, f, now, moves)

    def even(self, count: int) -> np.ndarray:
        """Points of an additive recurrence with the generalized golden ratio (Roberts 2018), which cover evenly."""
        d = len(self.fields)
        root = 2.0
        for _ in range(60):
            root = (1 + root) ** (1 / (d + 1))
        shares = (0.5 + np.arange(1, count + 1)[:, None] * root ** -np.arange(1.0, d + 1)) % 1
        return self.low + shares * (self.high - self.low)

    def around(self, points: np.ndarray, count: int, width: float, rng: np.random.Generator) -> np.ndarray:
        picked = points[rng.integers(len(points), size=count)]
        noise = width * rng.standard_normal(picked.shape) * self._range()
        for i, f in enumerate(self.fields):
            if f.levels:  # another level now and then
                noise[:, i] = 0
                other = rng.random(count) < 0.1
                picked[other, i] = rng.integers(len(f.levels), size=int(other.sum()))
        return np.clip(picked + noise, self.low, self.high)

    def _range(self) -> np.ndarray:
        """Of the data, so that a tight move does not shrink it to nothing; of the box where that is smaller."""
        table = self.process.rows
        data = np.array([1.0 if f.levels else float(np.ptp(_filled(table[f.name].values))) for f in self.fields])
        return np.minimum(data, np.maximum(self.high - self.low, 1e-12))

    def history(self) -> np.ndarray:
        columns = []
        for f in self.fields:
            values = self.process.rows[f.name].values
            if f.levels:
                columns.append(np.array([f.levels.index(v) if v in f.levels else 0 for v in values], float))
            else:
                columns.append(np.where(np.isnan(values), np.nanmedian(values), values))
        return np.clip(np.stack(columns, 1), self.low, self.high)

    def settled(self, points: np.ndarray) -> np.ndarray:
        """On the machine's steps and inside of the bounds; settings that always moved together stay together."""
        points = points.copy()
        names = [f.name for f in self.fields]
        table = self.process.rows
        for a, b, _ in self.process.tied:
            if a in names and b in names:
                u, v = table[a].values, table[b].values
                both = np.isfinite(u) & np.isfinite(v)
                slope, level = np.polyfit(u[both], v[both], 1)
                points[:, names.index(b)] = level + slope * points[:, names.index(a)]
        for i, f in enumerate(self.fields):
            step = 1.0 if f.levels else f.step
            if step:
                start = 0.0 if f.low is None or f.levels else f.low
                points[:, i] = start + np.round((points[:, i] - start) / step) * step
        inside = ((points >= self.low - 1e-9) & (points <= self.high + 1e-9)).all(1)
        return points[inside]

    def rows(self, points: np.ndarray, context: Row) -> dict[str, np.ndarray]:
        """Columns of the points in one context, as the encoder takes them."""
        made: dict[str, np.ndarray] = {}
        for i, f in enumerate(self.fields):
            made[f.name] = np.array(f.levels)[points[:, i].astype(int)] if f.levels else points[:, i]
        for f in self.process.encoder.fields:
            if f.role == "context":
                made[f.name] = np.full(len(points), context[f.name])
        return made

    def row(self, point: np.ndarray) -> Row:
        return {
            f.name: f.levels[int(v)] if f.levels else float(f"{v:.9g}") for f, v in zip(self.fields, point, strict=True)
        }


def _bounds(process: Process, f: Field, now: Row, moves: Mapping[str, float]) -> tuple[float, float]:
    if f.levels:
        if f.name in now and moves.get(f.name) == 0:
            at = float(f.levels.index(str(now[f.name])))
            return at, at
        return 0.0, len(f.levels) - 1.0
    values = _filled(process.rows[f.name].values)
    low = float(values.min()) if f.low is None else f.low
    high = float(values.max()) if f.high is None else f.high
    for limit in process.limits:
        if limit.name == f.name:
            low, high = (max(low, limit.bound), high) if limit.above else (low, min(high, limit.bound))
    move = moves.get(f.name, f.move)
    if move is not None and f.name in now:
        present = float(now[f.name])
        low, high = max(low, present - move), min(high, present + move)
    elif f.name in moves:
        raise ArgumentError(f"--move {f.name} needs the present value", hint=f"give --now {f.name}=VALUE")
    if low > high:
        raise ArgumentError(
            f"{f.name}: no value is inside of its bounds, limits and move ({low:g} is above {high:g})",
            hint="widen the move, the limit or the bounds",
        )
    if f.step:
        start = low if f.low is None else f.low
        if start + np.ceil((low - start) / f.step - 1e-9) * f.step > high + 1e-9:
            raise ArgumentError(f"{f.name}: no step of {f.step:g} lies between {low:g} and {high:g}", hint="widen them")
    return low, high


def _filled(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)] if values.dtype.kind == "f" else values
