"""How the metrics of a run are shown: charts and cards of its report, words of its progress line.

An objective describes its own metrics this way; the report and the progress line know none of them by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A chart: which metrics, and by what their values are multiplied to be in `unit`."""

    title: str
    unit: str
    metrics: Mapping[str, str]  # key of the metric: name of the line
    factor: float = 1.0
    zero: bool = False  # the axis begins at 0
    log: bool = False
    references: bool = False  # with lines for what the report compares with


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A card of the summary: the last value of a metric."""

    metric: str
    name: str
    unit: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns of numbers are aligned to the right. `note` says how the numbers were made."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Display:
    """`progress` gives the format of each metric on the progress line, the most important first:
    {"loss_nats": "loss {:.3f} nats"}."""

    curves: Sequence[Curve] = ()
    headlines: Sequence[Headline] = ()
    progress: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_names(cls, names: Iterable[str]) -> Display:
        """A chart for each metric under its own name, for metrics that nothing is known about."""
        return cls(curves=[Curve(title=name, unit="", metrics={name: name}) for name in names])
