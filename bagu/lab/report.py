"""One page with all results of this machine: `<out>/<machine>/report.html`.

The page is self-contained (CSS and SVG inside, no script, no request) and supports light and dark mode. Every text of a
result is escaped; the SVG is the plot of the run, recoloured for the page.
"""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from bagu.config import write_atomic
from bagu.errors import BaguError
from bagu.lab import catalogue
from bagu.lab.core import CLASS, WORD_ZH, Result, Row
from bagu.lab.draw import FILES
from bagu.lab.svg import inline
from bagu.machine.device import this_machine
from bagu.runs.html import facts, grid


def write_report(out: Path) -> Path:
    """Write the page for this machine's results under `out`, and return its path."""
    folder = out / this_machine().name
    results = [(Result.read(path), path.parent) for path in sorted(folder.glob("*/result.json"))]
    if not results:
        raise BaguError(
            f"there is no result under {folder}",
            hint="`bagu lab run NAME --quick` writes one in a few seconds; `bagu lab list` has the names",
        )
    page = folder / "report.html"
    write_atomic(page, render(results, machine=folder.name))
    return page


def render(results: Sequence[tuple[Result, Path]], *, machine: str) -> str:
    """The page. Each result comes with its folder, which may have a plot."""
    css = (files("bagu.lab") / "report.css").read_text(encoding="utf-8")
    contents = "".join(
        f'<li><a href="#{escape(result.lab.name)}">{escape(result.lab.title_en)}</a>{badge(result)}</li>'
        for result, _ in results
    )
    articles = "\n".join(article(result, folder) for result, folder in results)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>bagu labs on {escape(machine)}</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>Textbook claims, measured</h1>
<p class="soft">bagu labs on {escape(machine)} · <span lang="zh">八股，逐条实测</span></p>
<ul class="contents">{contents}</ul>
</header>
<main>
{articles}
</main>
<footer>Each verdict is computed from the rows below it. <code>bagu lab run NAME</code> measures a claim again.</footer>
</body>
</html>
"""


def article(result: Result, folder: Path) -> str:
    """One lab: claim, verdict, plot, description, and the numbers (collapsed)."""
    lab, verdict, kind, e = result.lab, result.verdict, result.verdict.kind, escape
    rows = f"<details><summary>{len(result.rows)} rows</summary>{table(result.rows)}</details>" if result.rows else ""
    machine = facts(result.environment.items())
    how = f"{'quick' if result.quick else 'full'} run on {result.device}, {result.seconds:.1f} s"
    if result.loaded:
        how += f", on a loaded machine ({result.load} waiting processes a core): times may be off"
    stale = lab.name in catalogue.sources() and result.code != catalogue.code_digest(lab.name)
    words = facts(
        [
            ("regime", lab.regime),
            ("varies", lab.varies),
            ("measures", lab.measures),
            *([("size", verdict.size)] if verdict.size else []),
            ("run", how),
            ("commit", f"{result.environment.get('commit')}{' (the lab has changed since)' if stale else ''}"),
        ]
    )
    takes = pair(verdict.takes_en, verdict.takes_zh, "To decide: ", "要下结论：")
    beside = pair(lab.published_en, lab.published_zh, "At large scale: ", "大规模的结果：")
    return f"""<article id="{e(lab.name)}">
<h2>{e(lab.title_en)}<span lang="zh">{e(lab.title_zh)}</span></h2>
<blockquote><p>{e(lab.claim_en)}</p><p lang="zh">{e(lab.claim_zh)}</p></blockquote>
<div class="finding {CLASS[kind]}">
<p class="verdict">{e(kind)} · <span lang="zh">{WORD_ZH[kind]}</span></p>
{pair(verdict.sentence_en, verdict.sentence_zh)}{takes}{beside}
</div>
{figure(result, folder)}
{words}
{rows}
<details><summary>environment</summary>{machine}</details>
</article>"""


def pair(en: str, zh: str, before_en: str = "", before_zh: str = "") -> str:
    """A text in both languages; nothing if there is none."""
    return f'<p>{before_en}{escape(en)}</p><p lang="zh">{before_zh}{escape(zh)}</p>' if en else ""


def badge(result: Result) -> str:
    return f'<span class="verdict {CLASS[result.verdict.kind]}">{escape(result.verdict.kind)}</span>'


def figure(result: Result, folder: Path) -> str:
    path = folder / FILES[0]
    if not path.exists():
        return '<p class="soft">No plot was drawn in this run: install bagu[plot] and run the lab again.</p>'
    return f"<figure>{inline(path.read_text(encoding='utf-8'), prefix=result.lab.name)}</figure>"


def table(rows: Sequence[Row]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return grid([key.replace("_", " ") for key in keys], [[row.get(key) for key in keys] for row in rows])
