"""Plots: one style, one SVG and one PNG per result, without global state of matplotlib.

The SVG has no background. Its lines and text use INK and FAINT, which the report replaces with the colours of its light
or dark page. Both are readable on white, so the files can also be used alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bagu.lab.core import Lab, Row
from bagu.runs.plot_style import FAINT, INK, write_plot

if TYPE_CHECKING:
    from matplotlib.axis import Axis

__all__ = ["COLOURS", "FAINT", "FILES", "INK", "draw", "log_ticks"]

# Okabe and Ito's colour-blind-safe palette, ordered so that neighbours differ in lightness. Its yellow and black are
# left out: they are too close to a light and a dark background.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7")
FILES = ("plot.svg", "plot.png")


def log_ticks(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 of each decade, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


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
