"""Two evaluations side by side: the same items, paired, with a p-value for each metric."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagu.eval.intervals import Comparison, Estimate, compare, estimate, estimate_ratio
from bagu.eval.score import graded, item_scores
from bagu.eval.task import TaskError
from bagu.eval.words import Scale, scale_of
from bagu.runs.record import read_rows

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One model's results on one task."""

    task: str
    model: str
    result: Row
    rows: dict[str, Row]  # by item


@dataclass(frozen=True, kw_only=True)
class Compared:
    task: str
    metric: str
    selected_by: str  # the normalisation or pass@k that decides an item
    a: Estimate
    b: Estimate
    difference: Comparison
    differing: tuple[tuple[Row, Row], ...]  # the items that only one of the models answers correctly

    @property
    def scale(self) -> Scale:
        return scale_of(self.metric)


def read_side(folder: Path) -> dict[str, Side]:
    """The results in a folder, by task."""
    found = {}
    for file in sorted(folder.glob("*/result.json")):
        written = [row for row in read_rows(file.parent / "items.jsonl") if "header" not in row]
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
            rows = {row["id"]: row for row in graded(written)}
            found[result["task"]] = Side(task=result["task"], model=result["model"], result=result, rows=rows)
        except (ValueError, LookupError, TypeError) as error:
            raise TaskError(f"{file} is no result of bagu eval: {error!r}", hint="evaluate again") from error
    if not found:
        raise TaskError(f"there are no results in {folder}", hint="`bagu eval MODEL TASK --out FOLDER` writes them")
    return found


def compare_folders(a: Path, b: Path) -> list[Compared]:
    """Compare every task that both folders have, on the items that both have."""
    left, right = read_side(a), read_side(b)
    shared = [task for task in left if task in right]
    if not shared:
        raise TaskError(f"{a} and {b} have no task in common", hint=f"{', '.join(left)}; {', '.join(right)}")
    return [_compared(left[task], right[task]) for task in shared]


def _compared(a: Side, b: Side) -> Compared:
    ids = [id for id, row in a.rows.items() if id in b.rows and _asked(row) == _asked(b.rows[id])]
    if not ids:
        raise TaskError(f"the two results of {a.task} have no item in common", hint="evaluate both on the same data")
    rows = [a.rows[i] for i in ids], [b.rows[i] for i in ids]
    clusters = [row["cluster"] or row["id"] for row in rows[0]]
    kind, metric, key = a.result["settings"]["kind"], next(iter(a.result["metrics"])), _selected_by(a)
    if _selected_by(b) != key:
        raise TaskError(
            f"the results of {a.task} are scored by {key} and by {_selected_by(b)}", hint="evaluate both in one way"
        )
    if kind == "loss":
        return _losses(a.task, metric, rows, clusters)
    scores = [item_scores(kind, side, a.result["k"])[key] for side in rows]
    differing = [(x, y) for x, y, p, q in zip(*rows, *scores, strict=True) if p != q]
    return Compared(
        task=a.task,
        metric=metric,
        selected_by=key,
        a=estimate(scores[0], clusters),
        b=estimate(scores[1], clusters),
        difference=compare(scores[0], scores[1], clusters),
        differing=tuple(differing),
    )


def _asked(row: Row) -> tuple[Any, ...]:
    """The question of a row. An id alone is a line of a file, which may have changed between two evaluations."""
    return tuple(row.get(name) for name in ("prompt", "messages", "choices", "answer"))


def _selected_by(side: Side) -> str:
    """The normalisation or pass@k of the task's metric."""
    settings = side.result["settings"]
    return settings["normalization"] if settings["kind"] == "choice" else f"pass@{side.result['k'][0]}"


def _losses(task: str, metric: str, rows: tuple[list[Row], list[Row]], clusters: Sequence[str]) -> Compared:
    """Bits per byte over all documents, and their difference, paired by document."""
    sizes = [row["bytes"] for row in rows[0]]
    bits = [[row["nats"] / math.log(2) for row in side] for side in rows]
    return Compared(
        task=task,
        metric=metric,
        selected_by="",
        a=estimate_ratio(bits[0], sizes, clusters),
        b=estimate_ratio(bits[1], sizes, clusters),
        difference=compare(bits[0], bits[1], clusters, below=sizes),
        differing=(),
    )
