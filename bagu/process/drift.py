"""Whether the latest rows of the process are still like the data.

One row tells little: if a context moves by three standard deviations, a quarter of its rows lies in the old range. A
stretch of rows tells more. Its mean is compared with those of the stretches of the same length in the data, in time
order: what varies slowly there (weather, wear) may do so again. Results that are known are compared with the intervals
that were promised for them: too many outside, or all on one side.
"""

from __future__ import annotations

from math import comb

import numpy as np

from bagu.errors import BaguError
from bagu.process.answer import Refusal
from bagu.process.health import time_order
from bagu.process.run import Process
from bagu.process.table import Column, Table

FEWEST, MOST = 3, 20  # latest rows that are looked at
DRIFT_LIMIT = 3.5  # standard deviations of the mean of a stretch; 1 in 2,000 of a normal distribution is farther
UNLIKELY = 0.001  # probability of as many results outside of their intervals
NORMAL_90, MEDIAN = 1.645, 1.253  # half of a 90 % interval, and √n times the sd of a median, for a normal distribution


def drifted(process: Process, recent: Table) -> Refusal | None:
    """A refusal if the latest rows, in time order, are unlike the data."""
    return _contexts(process, recent.take(np.arange(recent.rows)[-MOST:])) or _results(process, recent)


def recent_column(process: Process, recent: Table, name: str) -> Column:
    """A column of the latest rows, which must have the kind that it has in the data."""
    if name not in recent.names:
        raise BaguError(f"the recent rows have no column {name!r}", hint="give the columns of the data")
    found = recent[name]
    if found.kind != process.schema[name].kind:
        raise BaguError(f"{name} of the recent rows is not a {process.schema[name].kind}", hint="correct that column")
    return found


def _contexts(process: Process, latest: Table) -> Refusal | None:
    columns, fields = process.context_columns, process.encoder.fields
    count = min(latest.rows, process.table.rows // 5)
    if not len(columns) or count < FEWEST:
        return None
    unset = np.full(latest.rows, np.nan)
    values = {f.name: recent_column(process, latest, f.name).values if f.role == "context" else unset for f in fields}
    here = process.encoder.matrix(values)[-count:, columns].mean(0)
    past = process.encoder.of_table(process.table.take(time_order(process.table, process.schema)))[:, columns]
    sums = np.vstack([np.zeros(len(columns)), np.cumsum(past, 0)])
    stretches = (sums[count:] - sums[:-count]) / count
    spread = np.maximum(np.maximum(stretches.std(0), past.std(0) / np.sqrt(count)), 1e-12)
    usual = (np.abs(stretches - past.mean(0)) / spread).max()
    far = np.abs(here - past.mean(0)) / spread
    if far.max() <= max(DRIFT_LIMIT, usual):
        return None
    j = int(far.argmax())
    number = int(process.encoder.owner[columns[j]])
    if fields[number].levels:
        return Refusal("drifted_level", {"n": count, "column": fields[number].name})
    units = [
        process.encoder.centre[number] + v * process.encoder.scale[number]
        for v in (here[j], stretches[:, j].min(), stretches[:, j].max())
    ]
    value, low, high = (f"{v:.4g}" for v in units)
    return Refusal("drifted", {"n": count, "column": fields[number].name, "value": value, "low": low, "high": high})


def _results(process: Process, latest: Table) -> Refusal | None:
    goal, names = process.schema.target.name, process.encoder.names
    if not {goal, *names} <= set(latest.names):
        return None
    known = np.isfinite(recent_column(process, latest, goal).values)
    for group in process.schema.of("group"):  # rows of one batch share its luck: the last of each counts
        if group.name in latest.names:
            labels = latest[group.name].values
            known &= np.r_[labels[1:] != labels[:-1], True]
    rows = latest.take(np.flatnonzero(known)[-MOST:])
    if rows.rows < FEWEST:
        return None
    found = process.goal.model.predict(
        process.encoder.matrix({n: recent_column(process, rows, n).values for n in names})
    )
    y = rows[goal].values
    out = int(((y < found.low) | (y > found.high)).sum())
    miss = max(0.1, 1 - process.goal.coverage)
    chance = sum(comb(len(y), i) * miss**i * (1 - miss) ** (len(y) - i) for i in range(out, len(y) + 1))
    errors = (y - found.mean) / ((found.high - found.low) / (2 * NORMAL_90))
    far = abs(float(np.median(errors))) * np.sqrt(len(y)) / MEDIAN
    if chance >= UNLIKELY and far <= DRIFT_LIMIT:
        return None
    return Refusal(
        "results_drifted", {"n": len(y), "out": out, "target": goal, "shift": float(np.median(y - found.mean))}
    )
