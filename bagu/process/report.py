"""The report of a run: what the data is, what is wrong with it, how good the models are on rows they have not seen."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np

from bagu.config.files import write_atomic
from bagu.process.health import examine
from bagu.process.run import Process
from bagu.process.words import Lang, say
from bagu.runs.charts import Chart, Line
from bagu.runs.html import grid, text

MARKS = {"error": "✗", "warning": "!", "note": "·"}


def write_report(process: Process, folder: Path) -> None:
    """report.html, and report.zh.html in Chinese."""
    write_atomic(folder / "report.html", report(process, "en"))
    write_atomic(folder / "report.zh.html", report(process, "zh"))


def report(process: Process, lang: Lang) -> str:
    """The page as HTML; it loads nothing."""
    style = files("bagu.runs").joinpath("report.css").read_text(encoding="utf-8")
    facts = {"goal": process.goal.name, "rows": process.table.rows, "inputs": len(process.encoder.fields)}
    title = say("report_title", facts, lang)
    parts = [
        _card(say("findings", {}, lang), _findings(process, lang)),
        _card(
            say("roles", {}, lang),
            grid(
                say("role_heads", {}, lang).split("|"),
                [
                    (f.name, f.role + (f":{f.goal}" if f.goal != "none" else ""), f.unit, f.low, f.high, f.step)
                    for f in process.schema.columns
                ],
            ),
        ),
    ]
    for fit in process.fits.values():
        parts.append(_card(say("models_of", {"target": fit.name}, lang), _models(process, fit.name, lang)))
    parts.append(_card(say("chart", {}, lang), _chart(process, lang)))
    return (
        f'<!doctype html><html lang="{"zh-CN" if lang == "zh" else "en"}"><head><meta charset="utf-8">'
        f"<title>{text(title)}</title><style>{style}</style></head><body><header><h1>{text(title)}</h1>"
        f'<p class="note">{text(say("association", {}, lang))}</p></header><main>{"".join(parts)}</main>'
        "</body></html>\n"
    )


def _card(title: str, body: str) -> str:
    return f'<section class="card"><h2>{text(title)}</h2>{body}</section>'


def _findings(process: Process, lang: Lang) -> str:
    found = examine(process.table, process.schema)
    if not found:
        return f"<p>{text(say('healthy', {}, lang))}</p>"
    return "".join(f"<p>{MARKS[f.level]} {text(f.words(lang))}</p>" for f in found[:40])


def _models(process: Process, name: str, lang: Lang) -> str:
    fit = process.fits[name]
    rows = [
        (model, fit.model.weights.get(model), *(v for s in scores for v in (s.r2, s.rmse)))
        for model, scores in fit.scores.items()
    ]
    heads = [h for s in fit.scores["mean"] for h in (say(f"split_{s.split}", {}, lang), "RMSE")]
    lines = [f"<p>{text(line)}</p>" for line in score_notes(process, name, lang)]
    return grid((*say("model_heads", {}, lang).split("|"), *heads), rows) + "".join(lines)


def score_notes(process: Process, name: str, lang: Lang) -> list[str]:
    """What the figures mean, in sentences."""
    fit = process.fits[name]
    notes = [say("coverage", {"got": fit.coverage}, lang)]
    if fit.by_group:
        worst = min(fit.by_group, key=lambda group: fit.by_group[group])
        facts = {"low": fit.by_group[worst], "worst": worst, "high": max(fit.by_group.values())}
        notes.append(say("by_group", facts, lang))
    if fit.over_time:
        notes.append(say("over_time", {"each": ", ".join(f"{c:.0%}" for c in fit.over_time)}, lang))
        if min(fit.over_time) < 0.75:
            notes.append(say("drifts", {}, lang))
    return [*notes, *(say(why, {"model": model}, lang) for model, why in fit.left_out.items())]


def _chart(process: Process, lang: Lang) -> str:
    fit = process.goal
    mean = fit.model.predict(process.x).mean
    order = np.argsort(mean)
    blocks = np.array_split(order, min(40, len(order)))
    points = [(float(mean[b].mean()), float(process.y[b].mean())) for b in blocks if len(b)]
    ends = [(p, p) for p in (points[0][0], points[-1][0])]
    lines = [
        Line(name=say("chart_measured", {}, lang), points=points),
        Line(name=say("chart_equal", {}, lang), points=ends),
    ]
    return Chart(lines=lines, unit=process.schema.target.unit, x_name=say("chart_predicted", {}, lang)).svg()
