"""`bagu drill report`: progress as one page: what was solved, what is due, which mistakes come again."""

from __future__ import annotations

import time
from collections import Counter
from html import escape
from importlib.resources import files
from pathlib import Path

from bagu.lab.drill import catalogue
from bagu.lab.drill.core import TOPICS, Text
from bagu.lab.drill.diagnose import CAUSES
from bagu.lab.drill.progress import Progress
from bagu.lab.drill.words import TOPIC_NAMES, day

NOTE = (
    "A grade with * came after bagu's own answer was shown. Solved drills come again after 1, 3, 7, 21 and 60 days.",
    "带 * 的成绩是在看过答案之后取得的。解决之后第 1、3、7、21、60 天复习。",
)
HEADS = (("grade", "成绩"), ("drill", "题目"), ("difficulty", "难度"), ("checks", "历次"), ("", ""), ("next", "下次"))
COLOURS = {"A": "#1a7f37", "B": "#2f6f9f", "C": "#9a6700", "D": "#bc4c00", "E": "#b42318", "": "#8c959f"}


def write_page(file: Path, language: str, *, now: float | None = None) -> Path:
    """Write the page and return its path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(render(Progress.read(), language, time.time() if now is None else now), encoding="utf-8")
    return file


def render(progress: Progress, language: str, now: float) -> str:
    css = (files("bagu.lab") / "report.css").read_text(encoding="utf-8")
    say = lambda en, zh: escape(Text(en, zh)(language))  # noqa: E731
    drills = catalogue.written()
    solved = [n for n in drills if progress.solved(n)]
    due = [n for n in drills if progress.is_due(n, now)]
    causes = Counter(a.cause for a in progress.attempts if a.cause)
    boxes = (
        (say("solved", "已解决"), f"{len(solved)} / {len(drills)}"),
        (say("due today", "今日复习"), str(len(due))),
        (say("checks", "评分次数"), str(len(progress.attempts))),
    )
    cards = "".join(f'<div class="card"><b>{value}</b><span>{name}</span></div>' for name, value in boxes)
    mistakes = "".join(
        f"<tr><td>{escape(CAUSES[c](language))}</td><td>{n}</td></tr>" for c, n in causes.most_common(8) if c in CAUSES
    )
    topics = "".join(_topic(progress, topic, language, now) for topic in TOPICS)
    asked = say("Mistakes that come again", "反复出现的错误")
    table = f"<h2>{asked}</h2><table class='drills'>{mistakes}</table>" if mistakes else ""
    return f"""<!doctype html>
<html lang="{"zh" if language == "zh" else "en"}">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>bagu drills</title>
<style>
{css}
{STYLE}
</style></head>
<body>
<header><h1>{say("Drills: parts written by hand", "手撕代码")}</h1>
<p>{say(*NOTE)}</p></header>
<section class="cards">{cards}</section>
{topics}
{table}
</body></html>
"""


def _topic(progress: Progress, topic: str, language: str, now: float) -> str:
    rows = []
    for drill in catalogue.written().values():
        if drill.topic != topic:
            continue
        best, due = progress.best(drill.name), progress.due(drill.name)
        letter = best.letter if best else ""
        shown = f"{letter or '–'}{'*' if best and best.shown else ''}"
        mark = f'<span class="grade" style="background:{COLOURS[letter]}">{shown}</span>'
        when = "" if due is None else Text("due now", "现在")(language) if due <= now else day(due)
        late = ' class="late"' if due is not None and due <= now else ""
        tries = sum(a.drill == drill.name for a in progress.attempts)
        history = "".join(
            f'<i style="background:{COLOURS[a.letter]}" title="{a.letter} {day(a.when)}"></i>'
            for a in progress.attempts
            if a.drill == drill.name
        )
        rows.append(
            f"<tr><td>{mark}</td><td><b>{escape(drill.name)}</b><br><small>{escape(drill.title(language))}</small></td>"
            f"<td class='dots'>{'●' * drill.difficulty}</td><td class='history'>{history}</td><td>{tries or ''}</td>"
            f"<td{late}>{when}</td></tr>"
        )
    heads = [
        Text(*t)(language)
        for t in (
            ("grade", "成绩"),
            ("drill", "题目"),
            ("difficulty", "难度"),
            ("checks", "历次"),
            ("", ""),
            ("next", "下次"),
        )
    ]
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    title = escape(TOPIC_NAMES[topic](language))
    return f"<h2>{title}</h2><table class='drills'><tr>{head}</tr>{''.join(rows)}</table>" if rows else ""


STYLE = """
.cards { display: flex; gap: 1rem; flex-wrap: wrap; margin: 1rem 2rem }
.card { border: 1px solid #8885; border-radius: .5rem; padding: .8rem 1.2rem; min-width: 8rem }
.card b { display: block; font-size: 1.6rem } .card span { opacity: .7 }
table.drills { border-collapse: collapse; table-layout: fixed; width: calc(100% - 4rem); margin: .5rem 2rem 1.5rem }
table.drills th:nth-child(1) { width: 4rem } table.drills th:nth-child(3) { width: 7rem }
table.drills th:nth-child(5) { width: 3rem } table.drills th:nth-child(6) { width: 8rem }
body > h2 { margin-left: 2rem }
table.drills th { text-align: left; font-weight: 500; opacity: .6; font-size: .85rem; padding: .2rem .6rem }
table.drills td { border-top: 1px solid #8883; padding: .4rem .6rem; vertical-align: middle }
.grade { display: inline-block; min-width: 1.7rem; text-align: center; color: #fff;
  border-radius: .3rem; padding: .1rem .35rem }
.dots { color: #9a6700; letter-spacing: .1em } .late { color: #bc4c00; font-weight: 600 }
.history i { display: inline-block; width: .55rem; height: 1rem; margin-right: 2px; border-radius: 2px }
small { opacity: .7 }
"""
