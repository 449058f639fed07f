"""A plot per layer: time against batch size, for each implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagu.runs.plot_style import write_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"bagu": "#d55e00", "eager": "#0072b2", "compile": "#009e73", "onnxruntime": "#cc79a7"}


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> str | None:
    """Write one picture per layer into `folder`. Returns the reason if nothing was drawn, else None."""
    reason = None
    for name in dict.fromkeys(row["layer"] for row in rows):
        plot = partial(_plot, rows=[row for row in rows if row["layer"] == name])
        reason = write_plot(plot, folder / name, (9, 3.6), {"svg.hashsalt": name})
    return reason


def _plot(figure: Figure, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    steps = list(dict.fromkeys(row["pass"] for row in rows))
    for axes, step in zip(figure.subplots(1, len(steps), squeeze=False)[0], steps, strict=True):
        for name, colour in COLOURS.items():
            points = sorted(
                (r["batch"], 1e3 * r["median_s"]) for r in rows if r["pass"] == step and r["implementation"] == name
            )
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=name)
        axes.set(title=step, xlabel="batch", ylabel="ms", xscale="log", yscale="log")
        batches = sorted({r["batch"] for r in rows})
        axes.set_xticks(batches, labels=list(map(str, batches)))
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(True)
        axes.legend()
    first = rows[0]
    figure.suptitle(f"{first['layer']} {first['shape']}, {first['dtype']}, {first['device']}", x=0.01, ha="left")
