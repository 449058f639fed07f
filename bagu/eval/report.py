"""The page of a comparison: a table, a plot of both models with their intervals, and the items where they differ."""

import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from bagu import __version__
from bagu.config import write_atomic
from bagu.eval.choice import answers
from bagu.eval.compare import Compared
from bagu.eval.intervals import Estimate
from bagu.eval.words import Scale, p_value
from bagu.runs.charts import human, ticks
from bagu.runs.html import grid, text

ITEMS = 40  # the most items shown per task
WIDTH, ROW, LEFT, RIGHT = 760, 54, 190, 24
NO_BREAK = "\N{NO-BREAK SPACE}"


def write_comparison(found: Sequence[Compared], names: tuple[str, str], path: Path) -> Path:
    """Write the page of models `names` to `path`."""
    css = (files("bagu.runs") / "report.css").read_text(encoding="utf-8")
    a, b = (text(name) for name in names)
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{b} against {a}</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>{b} against {a}</h1>
<p class="soft">Scores with 95 % intervals over clusters; differences are paired, item by item.</p>
</header>
<main>
<section class="card">{_table(found, names)}</section>
{"".join(_plot(c, names) for c in found)}
{"".join(_items(c, names) for c in found if c.differing)}
</main>
<footer>bagu {__version__}</footer>
</body>
</html>
"""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page)
    return path


def _table(found: Sequence[Compared], names: tuple[str, str]) -> str:
    rows = []
    for c in found:
        words = (c.scale.score_and_interval(c.a), c.scale.score_and_interval(c.b), c.scale.difference(c.difference))
        unbroken = [word.replace(" ", NO_BREAK) for word in words]
        rows.append((c.task, c.metric.replace("_", " "), *unbroken, p_value(c.difference), c.a.items, c.a.clusters))
    return grid(("task", "metric", *names, "difference", "p", "items", "clusters"), rows)


def _plot(c: Compared, names: tuple[str, str]) -> str:
    title = f"{c.task}: {c.metric.replace('_', ' ')}"
    svg = interval_plot([(names[0], c.a), (names[1], c.b)], c.scale)
    return f'<section class="card"><h3>{text(title)}</h3><div class="scroll">{svg}</div></section>'


def interval_plot(rows: Sequence[tuple[str, Estimate]], scale: Scale) -> str:
    """A dot and a line from low to high for each row, on one axis, as SVG. Too wide for a phone: let it scroll."""
    ends = [end * scale.factor for _, e in rows for end in _drawn(e)]
    low, high = min(ends), max(ends)
    room = max((high - low) * 0.1, 1e-3 * max(abs(high), 1e-9))
    low, high = max(low - room, 0.0), high + room  # no score is negative
    height = ROW * len(rows) + 34

    def x(value: float) -> float:
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    base = ROW * len(rows) + 8
    parts = [f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}" stroke="var(--line)"/>']
    for tick in ticks(low, high, 5):
        parts.append(
            f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="0" y2="{base}" stroke="var(--grid)"/>'
            f'<text x="{x(tick):.1f}" y="{base + 18}" text-anchor="middle" fill="var(--soft)">{human(tick)}</text>'
        )
    parts.append(f'<text x="0" y="{base + 18}" fill="var(--soft)">{text(scale.name)}</text>')
    for i, (name, e) in enumerate(rows):
        y, colour, mean = ROW * i + ROW / 2, f"var(--c{i % 6})", x(e.mean * scale.factor)
        left, right = (x(end * scale.factor) for end in _drawn(e))
        parts.append(
            f'<text x="0" y="{y + 5:.0f}" fill="currentColor">{text(name[:24])}</text>'
            f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>'
            f'<circle cx="{mean:.1f}" cy="{y}" r="6" fill="{colour}"/>'
            f'<text x="{mean:.1f}" y="{y - 12:.0f}" text-anchor="middle" fill="currentColor">{scale.score(e)}</text>'
        )
    size = "display:block;width:100%;min-width:32rem;height:auto"
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" font-size="14" style="{size}">{"".join(parts)}</svg>'


def _drawn(e: Estimate) -> tuple[float, float]:
    """The ends of the line: both are the mean where there is no interval."""
    return (e.mean, e.mean) if math.isnan(e.low) else (e.low, e.high)


def _items(c: Compared, names: tuple[str, str]) -> str:
    shown = "".join(_item(a, b, names, c.selected_by) for a, b in c.differing[:ITEMS])
    more = len(c.differing) - ITEMS
    note = f'<p class="note">{more} more are in items.jsonl.</p>' if more > 0 else ""
    return f"<h2>{text(c.task)}: {len(c.differing)} items on which they differ</h2>{shown}{note}"


def _item(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str], selected_by: str) -> str:
    asked = a.get("prompt") or "\n".join(f"{m['role']}: {m['content']}" for m in a.get("messages", ()))
    sides = "".join(
        f'<div><p class="label">{text(name)}</p><pre>{text(_answer(row, selected_by))}</pre></div>'
        for name, row in zip(names, (a, b), strict=True)
    )
    right = f'<p class="label">right</p><pre>{text(a["choices"][a["answer"]])}</pre>' if "choices" in a else ""
    return (
        f'<details><summary>{text(str(a["id"]))}</summary><pre class="prompt">{text(asked)}</pre>{right}'
        f'<div class="pair">{sides}</div></details>'
    )


def _answer(row: dict[str, Any], selected_by: str) -> str:
    if "choices" in row:
        chosen = {str(name): choice for name, choice in answers(row).items()}
        return str(row["choices"][chosen[selected_by]])
    return "\n---\n".join(f"{g:g}: {t}" for g, t in zip(row["grades"], row["answers"], strict=True))
