"""`bagu bench process`: recommendations against plants whose truth is known, with intervals over histories.

A history (plant and seed) is one row of the record; those that the record has are not measured again, so that a run
that was stopped goes on, and a part can be run elsewhere. Histories are measured in processes of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
from rich.table import Table

from bagu.bench.harness import RESULTS, Rows, table
from bagu.bench.options import ProcessBench
from bagu.errors import UnknownName
from bagu.process.plants import PLANTS
from bagu.runs.files import complete_rows
from bagu.runs.record import record_file

MODELS = ("trees", "mlp")


def main(given: ProcessBench) -> int:
    for name in given.plants:
        UnknownName.check("plant", name, PLANTS)
    for name in given.models:
        UnknownName.check("model", name, MODELS)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the workers: one history has small matrices
    rows = Rows(given.out, default=RESULTS / "process", as_json=given.as_json)
    wanted = [(p, s) for s in range(given.first_seed, given.first_seed + given.seeds) for p in given.plants or PLANTS]
    asked = {"rows": given.rows, "noise": given.noise, "models": list(given.models)}
    record = complete_rows(record_file(given.out or RESULTS / "process"))
    done = {(r["plant"], r["seed"]): r for r in record if r.get("system") == "process" and asked.items() <= r.items()}
    missing = [key for key in wanted if key not in done]
    if missing:
        with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
            work = partial(_measure, rows=given.rows, noise=given.noise, models=given.models)
            for future in as_completed([pool.submit(work, *key) for key in missing]):
                made = rows.add([{"system": "process", **future.result()}])[0]
                done[made["plant"], made["seed"]] = made
    found = [done[key] for key in wanted]
    rows.all = found
    rows.finish(summary(found), comparison(found))
    return 0


def _measure(plant: str, seed: int, *, rows: int, noise: float, models: Sequence[str]) -> dict[str, Any]:
    from bagu.process.truth import measure

    return measure(plant, seed, rows=rows, noise=noise, models=models)


def summary(found: Sequence[dict[str, Any]]) -> Table:
    """The bars of the recommendation, per plant."""
    heads = ("plant", "histories", "gain", "over best row", "worse than operators", "over-promise", "truth above bound",
             "limits kept", "refused", "coverage", "same refused", "shifted refused", "shifted, one row alone",
             "rows until refused", "shuffled: given")  # fmt: skip
    lines = []
    for plant in dict.fromkeys(r["plant"] for r in found):
        rows = [r for r in found if r["plant"] == plant]
        given = [[c for c in r["cases"] if c["gain"] is not None] for r in rows]
        every = [c for cases in given for c in cases]
        cases = sum(len(r["cases"]) for r in rows)
        lines.append((
            plant, str(len(rows)), interval(_means(given, lambda c: c["gain"])),
            interval(_means(given, lambda c: c["gain"] - c["best_row"])), share([c["gain"] < 0 for c in every]),
            interval(_means(given, lambda c: c["over"])), share([c["above"] for c in every]),
            share([c["kept"] for c in every]), f"{100 * (1 - len(every) / cases):.1f} %",
            share([r["coverage"] for r in rows]), share([r["refused_same"] for r in rows]),
            share([r["refused_shifted"] for r in rows]), share([r["refused_row_shifted"] for r in rows]),
            f"{np.mean([r['delay'] for r in rows]):.1f}",
            f"{sum(r['blind_recommended'] for r in rows)} of {len(rows)}",
        ))  # fmt: skip
    return table("0 = the operators' mean in the context, 1 = its optimum; ± 95 % over histories", heads, lines)


def comparison(found: Sequence[dict[str, Any]]) -> Table:
    """Other rules in the same contexts."""
    heads = ("plant", "best row: gain", "worse", "maximum of the prediction: gain", "worse ", "over-promise")
    lines = []
    for plant in dict.fromkeys(r["plant"] for r in found):
        cases = [r["cases"] for r in found if r["plant"] == plant]
        every = [c for some in cases for c in some]
        lines.append(
            (
                plant,
                interval(_means(cases, lambda c: c["best_row"])),
                share([c["best_row"] < 0 for c in every]),
                interval(_means(cases, lambda c: c["maximum"])),
                share([c["maximum"] < 0 for c in every]),
                interval(_means(cases, lambda c: c["maximum_over"])),
            )
        )
    return table("Other rules in the same contexts", heads, lines)


def _means(cases: Iterable[Sequence[dict[str, Any]]], value: Any) -> list[float]:
    """One mean per history: its contexts share a model and are not independent."""
    return [float(np.mean([value(c) for c in some])) for some in cases if some]


def interval(values: Sequence[float]) -> str:
    if not values:
        return "–"
    half = 1.96 * np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
    return f"{np.mean(values):.3f} ± {half:.3f}"


def share(values: Sequence[float]) -> str:
    return f"{100 * float(np.mean(values)):.1f} %" if len(values) else "–"
