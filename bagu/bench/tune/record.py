"""The record of a search: a JSON line per measurement, so that a search that was stopped resumes where it was.

A row belongs to a search by its `search` field, a fingerprint of the model, the load, the limits and the space. Rows of
other searches in the same file are kept and ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bagu.bench.tune.search import Trial
from bagu.bench.tune.simulate import Samples
from bagu.bench.tune.space import Point
from bagu.runs.record import append_rows, read_rows


class Recorded:
    """Measures, and appends the result to the record; what is in the record is not measured again (`replayed`)."""

    def __init__(self, path: Path, search: str, measure: Callable[[Point, int], Trial]) -> None:
        self.path, self.search, self.measure, self.replayed = path, search, measure, 0
        self.known: dict[tuple[Point, int], deque[dict[str, Any]]] = {}  # the same point may be measured again
        for row in read_rows(path) if path.exists() else []:
            if row.get("search") == search:
                self.known.setdefault(_key(row), deque()).append(row)

    def __call__(self, point: Point, requests: int) -> Trial:
        if rows := self.known.get((point, requests)):
            self.replayed += 1
            return _trial(rows.popleft())
        trial = self.measure(point, requests)
        append_rows(self.path, [{"search": self.search, **asdict(trial), "point": dict(point)}])
        return trial


def _key(row: dict[str, Any]) -> tuple[Point, int]:
    return tuple(row["point"].items()), row["requests"]


def _trial(row: dict[str, Any]) -> Trial:
    samples = row["samples"]
    if samples is not None:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in samples.items()}
        samples = Samples(**values)
    fields = {k: v for k, v in row.items() if k not in ("search", "point", "samples")}
    return Trial(**fields, point=tuple(row["point"].items()), samples=samples)
