"""Plots: one quiet style, one SVG and one PNG per result, no global state of matplotlib.

The SVG has no background and draws its lines and words in INK and FAINT, which the report replaces by the colours of
its light or dark page. Both stay readable on white, so the files are fine on their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bagu.lab.core import Lab, Row
from bagu.runs.plot_style import FAINT, INK, STYLE

if TYPE_CHECKING:
    from matplotlib.axis import Axis

__all__ = ["COLOURS", "FAINT", "FILES", "INK", "draw", "log_ticks"]

# Okabe and Ito's palette for all kinds of colour vision, in an order where neighbours differ in lightness; its yellow
# and black are left out, being too close to the paper of a light and of a dark page.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7")
FILES = ("plot.svg", "plot.png")


def log_ticks(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 of each decade, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def draw(lab: Lab, rows: Sequence[Row], folder: Path) -> str | None:
    """Write plot.svg and plot.png into `folder`. Returns why they were not drawn, None when they were."""
    try:
        import matplotlib
        from cycler import cycler
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"matplotlib cannot be imported ({error}); pip install 'bagu[plot]' and run the lab again"
    style = STYLE | {
        "axes.grid": True,
        "axes.labelsize": 9,
        "axes.prop_cycle": cycler(color=COLOURS),
        "lines.linewidth": 1.6,
        "lines.markersize": 4,
        "svg.hashsalt": lab.name,  # the same rows give the same file
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9.0, 3.8), layout="constrained")
        lab.plot(figure, rows)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(folder / FILES[0], transparent=True, metadata=nothing)
        figure.savefig(folder / FILES[1], dpi=160, facecolor="white")
    return None
