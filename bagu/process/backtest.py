"""Did later runs near the recommendations do better? A model of the first rows is asked about the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bagu.errors import BaguError
from bagu.process.answer import Answer
from bagu.process.health import time_order
from bagu.process.models.ridge import Ridge
from bagu.process.recommend import recommend
from bagu.process.run import Process, fit_process

FIRST = 0.7  # share of the rows that the model sees
MOST = 36  # later rows that are asked about


@dataclass(frozen=True)
class Backtest:
    """`nearer` and `farther` are the mean results of the third of the later rows nearest to their recommendation and of
    the third farthest from it, less what their context explains; `half` is the 95 % half-width of their difference."""

    asked: int
    refused: int
    nearer: float
    farther: float
    half: float


def backtest(process: Process) -> Backtest:
    order = time_order(process.table, process.schema)
    if not process.schema.of("time"):
        order = np.random.default_rng(0).permutation(len(order))
    cut = int(FIRST * len(order))
    later = process.table.take(order[cut:])
    y = later[process.schema.target.name].values
    later = later.take(np.flatnonzero(np.isfinite(y)))
    if cut < 30 or later.rows < 12:
        raise BaguError(f"{len(order)} rows are too few for a back-test", hint="at least 60 are needed")
    early = fit_process(process.table.take(order[:cut]), process.schema, models=(), minutes=1)
    columns = [f.name for f in early.encoder.fields if f.role == "context"]
    picked = np.linspace(0, later.rows - 1, min(MOST, later.rows)).astype(int)
    distances, results, refused = [], [], 0
    x = early.encoder.of_table(later)
    y = later[process.schema.target.name].values
    expected = (
        Ridge.fit(early.x[:, early.context_columns], early.y).predict(x[:, early.context_columns]) if columns else 0
    )
    for i in picked:
        context = {n: later[n].values[i] for n in columns}
        found = recommend(early, {n: str(v) if isinstance(v, str) else float(v) for n, v in context.items()})
        if not isinstance(found, Answer):
            refused += 1
            continue
        wanted = early.encoder.of_rows([found.choices[0].settings | found.context])[0]
        distances.append(float(np.linalg.norm(wanted - x[i])))
        results.append(float((y - expected)[i]))
    if len(distances) < 9:
        return Backtest(len(picked), refused, np.nan, np.nan, np.nan)
    rank = np.argsort(distances)
    third = len(rank) // 3
    near, far = np.array(results)[rank[:third]], np.array(results)[rank[-third:]]
    half = 1.96 * np.sqrt(near.var(ddof=1) / third + far.var(ddof=1) / third)
    return Backtest(len(picked), refused, float(near.mean()), float(far.mean()), float(half))
