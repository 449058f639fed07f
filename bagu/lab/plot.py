"""A lab's plot as a value: panels side by side, each a list of marks. `draw.py` draws them with matplotlib.

def plot(rows):
    lines = [Line.of(where(rows, way=way), "length_tokens", "time_ms", way) for way in WAYS]
    return [Panel(lines, "Time", "length, tokens", "time, ms", xscale="log2", yscale="log")]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bagu.lab.rows import Row, number
from bagu.runs.plot_style import FAINT as FAINT
from bagu.runs.plot_style import INK as INK

# Okabe and Ito's colour-blind-safe palette, ordered so that neighbours differ in lightness. Its yellow and black are
# left out: they are too close to a light and a dark background.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7")
MIB = 2**20

Colour = int | str | None  # a place in COLOURS, any colour, or the next one of the palette
Ends = Sequence[tuple[float, float]]  # the low and the high end of the interval of each point
Scale = Literal["linear", "log", "log2", "symlog"]
Get = str | Callable[[Row], float]


def values(rows: Sequence[Row], get: Get) -> list[float]:
    """A number of each row: a column by its name, or a function of the row."""
    return [number(row, get) if isinstance(get, str) else get(row) for row in rows]


class Mark:
    """Something drawn in a panel."""


@dataclass(frozen=True)
class Line(Mark):
    """Points, joined if `style` (matplotlib's) has a line."""

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    style: str = "o-"
    colour: Colour = None
    ends: Ends | None = None
    size: float | None = None
    alpha: float = 1.0
    hollow: bool = False

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        x: Get,
        y: Get,
        label: str = "",
        style: str = "o-",
        colour: Colour = None,
        ends: tuple[str, str] | None = None,
        alpha: float = 1.0,
    ) -> Line:
        """The columns x and y of the rows where both have a number; `ends` names the columns of the intervals."""
        rows = [row for row in rows if all(not isinstance(k, str) or row.get(k) is not None for k in (x, y))]
        pairs = None if ends is None else list(zip(*(values(rows, key) for key in ends), strict=True))
        return cls(values(rows, x), values(rows, y), label, style, colour, pairs, alpha=alpha)


@dataclass(frozen=True)
class Bars(Mark):
    """A bar at each place 0, 1, …; several of these in a panel stand side by side. `text` formats a value at its bar;
    colour "each" gives every bar its own."""

    y: Sequence[float | None]
    label: str = ""
    colour: Colour = None
    ends: Ends | None = None
    text: str = ""
    sideways: bool = False
    bottom: float = 0.0


@dataclass(frozen=True)
class Band(Mark):
    """The area between two lines."""

    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    colour: Colour = None


@dataclass(frozen=True)
class Stack(Mark):
    """Layers on top of each other."""

    x: Sequence[float]
    layers: dict[str, list[float]]


@dataclass(frozen=True)
class Heat(Mark):
    """Percentages in a grid: none is blue, any is orange to red."""

    percent: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Rule(Mark):
    """A line through the whole panel at a value of the y axis (or x), or an area up to another value."""

    at: float
    label: str = ""
    axis: Literal["x", "y"] = "y"
    upto: float | None = None
    style: str = ":"
    colour: Colour = INK


@dataclass(frozen=True)
class Note(Mark):
    """A text beside a point. An x of None is the left border, a y of None the lower one."""

    x: float | None
    y: float | None
    text: str
    colour: Colour = INK
    shift: tuple[float, float] = (0, 4)  # points
    align: Literal["left", "center", "right"] = "left"


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `xnames` and `ynames` name the places 0, 1, …; the first of `ynames` is at the top."""

    marks: Sequence[Mark]
    title: str = ""
    x: str = ""
    y: str = ""
    xscale: Scale = "linear"
    yscale: Scale = "linear"
    xlim: tuple[float | None, float | None] | None = None
    ylim: tuple[float | None, float | None] | None = None
    xnames: Sequence[str] | None = None
    ynames: Sequence[str] | None = None
    legend: Literal["inside", "below", "none"] = "inside"
    width: float = 1.0
    share_y: bool = False  # with the first panel


def by_length(rows: Sequence[Row], ways: Sequence[str], time: str, what: str, *, slopes: bool = False) -> list[Panel]:
    """Time (column `time`) and peak memory of each way over the length; `slopes` adds lines of L and L²."""
    panels = []
    for key, scale, title, unit in (
        (time, 1, "Time", "time, ms"),
        ("peak_bytes", MIB, "Memory", "peak memory beyond inputs, MiB"),
    ):
        marks: list[Mark] = []
        for way in ways:
            own = [row for row in rows if row["way"] == way]
            marks.append(Line(values(own, "length_tokens"), [v / scale for v in values(own, key)], way))
        ends = [f(values(rows, "length_tokens")) for f in (min, max)]
        start = min(values(rows, key)) / scale
        for slope in (1, 2) if slopes else ():
            line = [start * (end / ends[0]) ** slope for end in ends]
            marks += [Line(ends, line, "", ":", "grey"), Note(ends[1], line[1], f"L^{slope}", "grey", align="right")]
        panels.append(Panel(marks, f"{title} of {what}", "length, tokens", unit, "log2", "log", legend="below"))
    return panels
