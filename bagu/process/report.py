"""The report of a run: what the data is, what is wrong with it, how good the models are on rows they have not seen."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np

from bagu.config.files import write_atomic
from bagu.process.health import examine
from bagu.process.run import Process
from bagu.process.words import say
from bagu.runs.charts import Chart, Line
from bagu.runs.html import grid, text

MARKS = {"error": "✗", "warning": "!", "note": "·"}


def write_report(process: Process, path: Path) -> None:
    write_atomic(path, report(process))


def report(process: Process) -> str:
    """The page as HTML; it loads nothing."""
    style = files("bagu.runs").joinpath("report.css").read_text(encoding="utf-8")
    goal = process.schema.target
    title = f"{goal.name}: {process.table.rows:,} rows, {len(process.encoder.fields)} inputs"
    parts = [
        _card("Findings in the data", _findings(process)),
        _card("Roles", grid(("column", "role", "unit", "low", "high", "step"), [
            (f.name, f.role + (f":{f.goal}" if f.goal != "none" else ""), f.unit, f.low, f.high, f.step)
            for f in process.schema.columns
        ])),
    ]  # fmt: skip
    for fit in process.fits.values():
        parts.append(_card(f"Models of {fit.name}, on rows they have not seen", _models(process, fit.name)))
    parts.append(_card("Measured against predicted", _chart(process)))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f"<style>{style}</style></head><body><header><h1>{text(title)}</h1>"
        f'<p class="note">{text(say("association", {}))}</p></header><main>{"".join(parts)}</main></body></html>\n'
    )


def _card(title: str, body: str) -> str:
    return f'<section class="card"><h2>{text(title)}</h2>{body}</section>'


def _findings(process: Process) -> str:
    found = examine(process.table, process.schema)
    if not found:
        return f"<p>{text(say('healthy', {}))}</p>"
    return "".join(f"<p>{MARKS[f.level]} {text(f.words())}</p>" for f in found[:40])


def _models(process: Process, name: str) -> str:
    fit = process.fits[name]
    rows = [
        (model, fit.model.weights.get(model), *(v for s in scores for v in (s.r2, s.rmse)))
        for model, scores in fit.scores.items()
    ]
    heads = [h for s in fit.scores["mean"] for h in (f"R², {s.split} split", "RMSE")]
    lines = [f"<p>{text(line)}</p>" for line in score_notes(process, name)]
    return grid(("model", "weight", *heads), rows) + "".join(lines)


def score_notes(process: Process, name: str) -> list[str]:
    """What the figures mean, in sentences."""
    fit = process.fits[name]
    notes = [f"90 % interval: asked 90 %, got {fit.coverage:.0%} on held-out rows"]
    if fit.by_group:
        notes.append(f"groups of 30 rows or more: coverage {min(fit.by_group):.0%} to {max(fit.by_group):.0%}")
    if fit.over_time:
        notes.append(f"forward in time, block by block: {', '.join(f'{c:.0%}' for c in fit.over_time)}")
        if min(fit.over_time) < 0.75:
            notes.append("the process drifts: later rows leave the interval more often than promised")
    notes += [f"{model} was left out: {why}" for model, why in fit.left_out.items()]
    return notes


def _chart(process: Process) -> str:
    fit = process.goal
    mean = fit.model.predict(process.x).mean
    order = np.argsort(mean)
    blocks = np.array_split(order, min(40, len(order)))
    points = [(float(mean[b].mean()), float(process.y[b].mean())) for b in blocks if len(b)]
    ends = [(p, p) for p in (points[0][0], points[-1][0])]
    chart = Chart(
        lines=[Line(name="measured, mean of rows alike", points=points), Line(name="equal", points=ends)],
        unit=process.schema.target.unit, x_name="predicted",
    )  # fmt: skip
    return chart.svg()
