"""Plots: one style, one SVG and one PNG per result, without global state of matplotlib.

The SVG has no background. Its lines and text use INK and FAINT, which the report replaces with the colours of its light
or dark page. Both are readable on white, so the files can also be used alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bagu.lab.core import Lab, Row, number
from bagu.runs.plot_style import FAINT, INK, write_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "FAINT", "FILES", "INK", "MIB", "draw", "log_ticks", "plot_by_length"]

# Okabe and Ito's colour-blind-safe palette, ordered so that neighbours differ in lightness. Its yellow and black are
# left out: they are too close to a light and a dark background.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7")
FILES = ("plot.svg", "plot.png")
MIB = 2**20


def log_ticks(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 of each decade, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def plot_by_length(fig: Figure, rows: Sequence[Row], ways: Sequence[str], time: str, what: str) -> tuple[Axes, Axes]:
    """Time (field `time`) and peak memory of each way over the length, both logarithmic; returns the two axes. `what`
    was measured."""
    left, right = fig.subplots(1, 2)
    for way in ways:
        chosen = [row for row in rows if row["way"] == way]
        lengths = [number(row, "length_tokens") for row in chosen]
        left.plot(lengths, [number(row, time) for row in chosen], "o-", label=way)
        right.plot(lengths, [number(row, "peak_bytes") / MIB for row in chosen], "o-", label=way)
    left.set(ylabel="time, ms", title=f"Time of {what}")
    right.set(ylabel="peak memory beyond inputs, MiB", title=f"Memory of {what}")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="length, tokens")
        log_ticks(axes.yaxis)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return left, right


def draw(lab: Lab, rows: Sequence[Row], folder: Path) -> str | None:
    """Write plot.svg and plot.png to `folder`. Returns the reason if they were not drawn, else None."""
    style = {
        "axes.grid": True,
        "axes.labelsize": 9,
        "axes.prop_cycle": f"cycler(color={list(COLOURS)})",
        "lines.linewidth": 1.6,
        "lines.markersize": 4,
        "svg.hashsalt": lab.name,  # the same rows give the same file
    }
    path = folder / Path(FILES[0]).stem
    return write_plot(lambda figure: lab.plot(figure, rows), path, (9.0, 3.8), style, transparent=True, dpi=160)
