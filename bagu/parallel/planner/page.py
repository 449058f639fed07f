"""HTML pages of a plan and of the validation: self-contained, CSS and SVG inside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagu.parallel.planner.calibration import CALIBRATION
from bagu.parallel.planner.explain import explain, mesh_line
from bagu.parallel.planner.rows import left_out, sources
from bagu.parallel.planner.validate import Report
from bagu.runs.html import facts, grid, text

if TYPE_CHECKING:
    from bagu.parallel.plan import Plan


def plan_page(plan: Plan, title: str, svg: Path | None) -> str:
    """The plan: facts of the winner, sentences, plot, and the best layouts."""
    winner = plan.winner
    gpu = plan.cluster.gpu
    head = facts(
        [
            ("layout", winner.layout.words()),
            ("bagu train", mesh_line(winner.layout, plan.workload.batch)),
            ("step, s", winner.step_s),
            ("tokens/s", winner.tokens_per_s),
            ("MFU, %", 100 * winner.mfu),
            ("GiB per GPU", winner.memory_gib),
            ("GPU", f"{plan.gpus} × {gpu.name}, {gpu.memory_gib:.0f} GiB, {plan.cluster.gpus_per_node} per node"),
        ]
    )
    rows: list[Sequence[Any]] = [
        (c.layout.words(), c.step_s, 100 * c.mfu, c.tokens_per_s, c.memory_gib) for c in plan.distinct(20)
    ]
    table = grid(("layout", "step, s", "MFU, %", "tokens/s", "GiB per GPU"), rows)
    said = "".join(f"<p>{text(sentence)}</p>" for sentence in explain(plan))
    body = f"{head}<h2>Why</h2>{said}{_figure(svg)}<h2>Layouts</h2>{table}"
    return _page(title, body)


def validation_page(report: Report, svg: Path | None) -> str:
    """Errors per source, ranking, memory, constants, and every row."""
    per_source = grid(
        ("source", "used for", "rows", "mean error, %", "mean signed error, %"),
        [
            (name, "judging" if judges else "calibration", n, 100 * error, 100 * bias)
            for name, (judges, n, error, bias) in report.errors.items()
        ],
    )
    ranking = "".join(
        f"<h3>{text(title)}: {100 * share:.1f} % of {pairs} pairs in the right order</h3>"
        + grid(("set", "rows", "pairs", "right, %"), [(r.name, r.rows, r.pairs, 100 * r.right / r.pairs) for r in sets])
        for title, share, pairs, sets in report.rankings
    )
    memory = grid(
        ("source", "rows", "mean error, %", "mean signed error, %"),
        [(name, n, 100 * error, 100 * bias) for name, (n, error, bias) in report.memory.items()],
    )
    own = grid(
        ("model", "GPU", "micro-batches", "measured, s", "predicted, s", "error, %", "measured, GB", "predicted, GB",
         "error, %"),
        [
            (x.model, x.gpu, x.micro_batches, x.measured_s, x.predicted_s, 100 * x.time_error, x.measured_bytes / 1e9,
             x.predicted_bytes / 1e9, 100 * x.memory_error)
            for x in report.own
        ],
    )  # fmt: skip
    used = facts([(name, value) for name, value in vars(CALIBRATION).items()])
    where = "".join(
        f"<li>{text(about['title'])}: {text('; '.join(about['url']))}"
        + (f" (inferred: {text('; '.join(about['inferred']))})" if about.get("inferred") else "")
        + "</li>"
        for about in sources().values()
    )
    omitted = "".join(f"<li>{text(source)}: {text(reason)}</li>" for source, reason in dict.fromkeys(left_out()))
    rows = grid(
        ("source", "model", "GPUs", "layout", "seq", "batch", "measured, s", "predicted, s", "error, %"),
        [
            (x.row.source, x.row.model, x.row.layout.gpus, x.row.layout.words(), x.row.workload.seq,
             x.row.workload.batch, x.row.measured_s, x.predicted_s, 100 * x.error)
            for x in report.done
        ],
    )  # fmt: skip
    body = (
        f"{facts(report.summary())}{_figure(svg)}<h2>Step time per source</h2>{per_source}<h2>Ranking</h2>{ranking}"
        f"<h2>Memory</h2><p>{text(report.out_of_memory)}</p>{memory}"
        f"<h2>bagu on one GPU</h2>{own}<h2>Constants</h2>{used}"
        f"<h2>Sources</h2><ul>{where}</ul><h2>Rows that are not compared</h2><ul>{omitted}</ul>"
        f"<h2>All rows</h2><details><summary>{len(report.done)} rows</summary>{rows}</details>"
    )
    return _page("The planner beside published measurements", body)


def _figure(svg: Path | None) -> str:
    if svg is None:
        return ""
    drawing = svg.read_text(encoding="utf-8")
    return f'<div class="card">{drawing[drawing.index("<svg") :]}</div>'


def _page(title: str, body: str) -> str:
    css = (files("bagu.runs") / "report.css").read_text(encoding="utf-8")
    body = re.sub(r'(<svg[^>]*) width="[^"]*" height="[^"]*"', r'\1 style="width:100%;height:auto"', body)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)}</title>
<style>
{css}</style>
</head>
<body>
<header><h1>{text(title)}</h1></header>
<main>
{body}
</main>
<footer>Written by <code>bagu plan</code>.</footer>
</body>
</html>
"""
