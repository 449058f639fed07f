"""`report.html`: one page about a training run, or about several runs of one pipeline.

The page is self-contained: style and charts are inline, and a content security policy forbids scripts and network
access. It follows the reader's light or dark setting. Every text from a run is escaped, model output included.
"""

import datetime
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import bagu.train.objectives  # noqa: F401  (makes them known by their kind)
from bagu import __version__
from bagu import config as configs
from bagu.config import write_atomic
from bagu.errors import BaguError
from bagu.runs.charts import Chart, Line, Mark, Reference
from bagu.runs.display import Curve, Display, Table
from bagu.runs.folder import RunFolder
from bagu.runs.html import facts, grid, text, text_of
from bagu.runs.observer import ROUTINE_EVENTS
from bagu.train.objective import Objective

MAX_EVENTS = 200


@dataclass(frozen=True, kw_only=True)
class Card:
    """A number of the summary; `value` includes its unit."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The model's text for one prompt, before and after training; `verdicts` are on the two texts, if known."""

    prompt: str
    before: str
    after: str
    verdicts: tuple[str, str] = ("", "")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The content of a run folder."""

    name: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]] = ()
    samples: Mapping[int, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """The content of the page. Without `cards` the summary is created from the last run's metrics."""

    title: str
    runs: Sequence[Run]
    subtitle: str = ""
    cards: Sequence[Card] = ()
    references: Mapping[str, float] = field(default_factory=dict)  # by name: lines on the charts that reference them
    comparisons: Sequence[Comparison] = ()
    compared: tuple[str, str] = ("before", "after")  # labels of the two sides of the comparisons
    tables: Sequence[Table] = ()


TASK = "task_"  # begins the names of the scores of tasks
CURVES = (  # of every run, after the curves of its objective
    Curve(title="Learning rate", unit="", metrics={"lr": "learning rate"}),
    Curve(title="Gradient norm", unit="", metrics={"grad_norm": "gradient norm"}, log=True),
    Curve(title="Speed", unit="tokens/s", metrics={"tokens_per_s": "speed"}, zero=True),
    Curve(title="Model FLOP utilisation", unit="% of the peak", metrics={"mfu_percent": "MFU"}, zero=True),
    Curve(title="Memory", unit="GiB", metrics={"memory_bytes": "memory"}, factor=2.0**-30, zero=True),
    Curve(title="Padding", unit="% of tokens", metrics={"padding_percent": "padding"}, zero=True),
    Curve(title="Waiting for others", unit="% of the time", metrics={"idle_percent": "worker 0 waits"}, zero=True),
    Curve(title="Age of the weights", unit="updates", metrics={"read_age_updates": "age"}, zero=True),
    Curve(
        title="Bytes of worker 0",
        unit="MB per step",
        factor=1e-6,
        zero=True,
        metrics={"pushed_bytes": "gradients pushed", "pulled_bytes": "values pulled"},
    ),
    Curve(title="Waiting for data", unit="ms per step", metrics={"data_wait_s": "wait"}, factor=1e3, zero=True),
)


def read_run(folder: RunFolder | str | os.PathLike[str], name: str = "") -> Run:
    """Read the run in `folder`, which may still be running. `name` defaults to the folder's name."""
    folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    if not folder.is_run():
        raise BaguError(f"{folder.path} is not the folder of a run", hint="give the --out of a bagu train")
    return Run(
        name=name or folder.path.resolve().name,
        config=folder.config(),
        environment=folder.environment(),
        metrics=folder.metrics(),
        events=folder.events(),
        samples=folder.samples(),
    )


def write_report(
    source: ReportData | RunFolder | str | os.PathLike[str], path: str | os.PathLike[str] | None = None
) -> Path:
    """Write the page of `source`, or of the run in that folder, and return its path.

    `path` defaults to `report.html` in the run's folder; a ReportData has no folder and needs `path`.
    """
    if isinstance(source, ReportData):
        if path is None:
            raise ValueError("a report of several runs needs a path")
        data = source
    else:
        folder = source if isinstance(source, RunFolder) else RunFolder(source)
        run = read_run(folder)
        data, path = ReportData(title=run.name, runs=[run]), path or folder.report
    write_atomic(path, render(data))
    return Path(path)


def render(data: ReportData) -> str:
    """The HTML of the page."""
    if not data.runs:
        raise ValueError("a report needs a run")
    css = (files("bagu.runs") / "report.css").read_text(encoding="utf-8")
    last = data.runs[-1]
    where = f"{last.environment['machine']} · {_date(last.environment['time'])}"
    sections = [
        _comparisons(data),
        *(
            _run(run, data.references if number == 0 else {}, len(data.runs) > 1)
            for number, run in enumerate(data.runs)
        ),
        "".join(_table(table) for table in data.tables),
        _details(data.runs),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="bagu {__version__}">
<title>{text(data.title)}</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>{text(data.title)}</h1>
<p class="soft">{text(data.subtitle or where)}</p>
{_cards(data.cards or summary(last))}
</header>
<main>
{"".join(sections)}</main>
<footer>{text(f"bagu {__version__}" + (f" · {where}" if data.subtitle else ""))}</footer>
</body>
</html>
"""


def summary(run: Run) -> list[Card]:
    """The cards of a run: the last values of its headline metrics, steps, speed, memory."""
    cards = []

    def last(key: str) -> float | None:
        return next((row[key] for row in reversed(run.metrics) if row.get(key) is not None), None)

    for line in display_of(run).headlines:
        if (value := last(line.metric)) is not None:
            cards.append(Card(name=line.name, value=f"{value:.3f} {line.unit}".strip(), note=line.note))
    if run.metrics:
        cards.append(Card(name="Steps", value=f"{run.metrics[-1]['step'] + 1:,} steps"))
    if speeds := [row["tokens_per_s"] for row in run.metrics if row.get("tokens_per_s") is not None]:
        cards.append(Card(name="Speed", value=f"{statistics.median(speeds):,.0f} tokens/s", note="median of the steps"))
    if shares := [row["mfu_percent"] for row in run.metrics if row.get("mfu_percent") is not None]:
        cards.append(Card(name="MFU", value=f"{statistics.median(shares):.1f} %", note="median, of the peak FLOP/s"))
    if sizes := [row["memory_bytes"] for row in run.metrics if row.get("memory_bytes") is not None]:
        cards.append(Card(name="Memory", value=f"{max(sizes) / 2**30:.2f} GiB", note="peak"))
    return cards


def display_of(run: Run) -> Display:
    """How the metrics of the run's objective are shown; one chart per metric if this version has no such objective."""
    objective = objective_of(run)
    if objective is None:
        common = {"step", "tokens", *(key for curve in CURVES for key in curve.metrics)}
        return Display.of_names(sorted({key for row in run.metrics for key in row} - common))
    shown = objective.display()
    tasks = sorted({key for row in run.metrics for key in row if key.startswith(TASK)})
    return replace(shown, curves=(*shown.curves, *map(task_curve, tasks)))


def task_metric(task: str, metric: str) -> str:
    """The name of the logged score of a task: task_continue4_accuracy_percent, task_library_bits_per_byte."""
    return f"{TASK}{task}_{metric}" + ("" if metric == "bits_per_byte" else "_percent")


def task_curve(metric: str) -> Curve:
    name = metric.removeprefix(TASK).removesuffix("_percent").replace("_", " ")
    unit = "%" if metric.endswith("_percent") else "bits per byte"
    return Curve(title=f"Task {name}", unit=unit, metrics={metric: "task"})


def objective_of(run: Run) -> Objective[Any] | None:
    """The objective of a run; None if this version has no such objective."""
    try:
        return configs.from_dict(Shown, {"objective": run.config.get("objective")}).objective
    except BaguError:
        return None


@dataclass(frozen=True)
class Shown:
    """The part of a run's configuration that determines how its metrics are shown."""

    objective: Objective


# Sections


def _cards(cards: Iterable[Card]) -> str:
    def one(card: Card) -> str:
        note = f'<p class="note">{text(card.note)}</p>' if card.note else ""
        return f'<div class="card"><dl><dt>{text(card.name)}</dt><dd>{text(card.value)}</dd></dl>{note}</div>'

    return f'<div class="cards">{"".join(map(one, cards))}</div>'


def _comparisons(data: ReportData) -> str:
    """The given comparisons; without any, the first and last samples of the last run that has samples."""
    pairs, names = list(data.comparisons), data.compared
    sampled = next((run.samples for run in reversed(data.runs) if len(run.samples) > 1), None)
    if not pairs and sampled:
        first, last = min(sampled), max(sampled)
        names = (f"after step {first:,}", f"after step {last:,}")
        pairs = [Comparison(prompt="", before=a, after=b) for a, b in zip(sampled[first], sampled[last], strict=False)]
    if not pairs:
        return ""

    def side(name: str, words: str, verdict: str) -> str:
        label = text(": ".join(filter(None, (name, verdict))))
        return f'<div class="{text(verdict)}"><p class="label">{label}</p><pre>{text(words)}</pre></div>'

    cards = [
        '<div class="card">'
        + (f'<p class="label">prompt</p><pre class="prompt">{text(pair.prompt)}</pre>' if pair.prompt else "")
        + '<div class="pair">'
        + side(names[0], pair.before, pair.verdicts[0])
        + side(names[1], pair.after, pair.verdicts[1])
        + "</div></div>"
        for pair in pairs
    ]
    return f"<section><h2>What it writes</h2>{''.join(cards)}</section>\n"


def _run(run: Run, references: Mapping[str, float], named: bool) -> str:
    """The charts of one run; a metric that never changes is shown as a fact instead."""
    marks = [
        Mark(name=f"step {e['step']:,}: {e['kind'].replace('_', ' ')}", x=e["step"])
        for e in run.events
        if e["kind"] not in ROUTINE_EVENTS and e["step"] is not None
    ]
    figures, constants = [], []
    for curve in (*display_of(run).curves, *CURVES):
        lines = [Line(name=name, points=_points(run.metrics, key, curve.factor)) for key, name in curve.metrics.items()]
        lines = [line for line in lines if line.points]
        values = {y for line in lines for _, y in line.points}
        if len(values) == 1 and len(run.metrics) > 1 and not curve.references:
            constants.append((curve.title, f"{text_of(values.pop())} {curve.unit}, at every step".replace(" ,", ",")))
        elif values:
            beside = [Reference(name=n, y=y) for n, y in references.items()] if curve.references else []
            chart = Chart(lines=lines, unit=curve.unit, references=beside, marks=marks, zero=curve.zero, log=curve.log)
            figures.append(f'<div class="card"><h3>{text(curve.title)}</h3>{chart.svg()}</div>')
    if not figures:
        return ""
    title = f"Curves: {run.name}" if named else "Curves"
    constant = facts(constants) if constants else ""
    curves = f'<section><h2>{text(title)}</h2><div class="grid">{"".join(figures)}</div>{constant}</section>\n'
    objective = objective_of(run)
    tables = () if objective is None else objective.metric_tables(run.metrics)
    of = f": {run.name}" if named else ""
    return curves + "".join(_table(replace(table, title=table.title + of)) for table in tables)


def _points(metrics: Sequence[Mapping[str, Any]], key: str, factor: float) -> list[tuple[float, float]]:
    return [(row["step"], row[key] * factor) for row in metrics if row.get(key) is not None and math.isfinite(row[key])]


def _table(table: Table) -> str:
    note = f'<p class="note">{text(table.note)}</p>' if table.note else ""
    return f"<section><h2>{text(table.title)}</h2>{grid(table.columns, table.rows)}{note}</section>\n"


def _details(runs: Sequence[Run]) -> str:
    """Configuration, environment and events, collapsed; an environment that all runs share is shown once."""
    parts, seen = [], None
    for run in runs:
        of = f" of {run.name}" if len(runs) > 1 else ""
        config = json.dumps(run.config, indent=2, ensure_ascii=False)
        parts.append(f"<details><summary>Configuration{text(of)}</summary><pre>{text(config)}</pre></details>")
        software = {key: value for key, value in run.environment.items() if key != "time"}
        if software != seen:
            about = facts(run.environment.items())
            parts.append(f"<details><summary>Environment{text(of)}</summary>{about}</details>")
        seen = software
        if run.events:
            parts.append(f"<details><summary>Events{text(of)}: {len(run.events):,}</summary>{_events(run)}</details>")
    return f"<section><h2>How it was made</h2>{''.join(parts)}</section>\n"


def _events(run: Run) -> str:
    rows = []
    for event in run.events[-MAX_EVENTS:]:
        more = {key: value for key, value in event.items() if key not in ("step", "kind", "time")}
        words = "; ".join(f"{key.replace('_', ' ')}: {text_of(value)}" for key, value in more.items() if value != [])
        rows.append((_date(event["time"]), event["step"], event["kind"].replace("_", " "), words))
    left = len(run.events) - len(rows)
    note = f'<p class="note">{left:,} earlier events are in events.jsonl.</p>' if left else ""
    return note + grid(("time", "step", "what", "facts"), rows)


# Words


def _date(iso: str) -> str:
    return f"{datetime.datetime.fromisoformat(iso):%Y-%m-%d %H:%M} UTC"
