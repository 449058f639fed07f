"""One plot style for benchmarks, labs and reports, and the function that writes a plot in this style."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT = "#2b2f36", "#d4d7dd"
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def write_plot(
    draw: Callable[[Figure], None],
    path: Path,
    size: tuple[float, float],
    style: Mapping[str, Any],
    *,
    transparent: bool = False,
    dpi: int = 140,
) -> str | None:
    """Call `draw` with a new figure of `size` inches and write it as `path`.svg and `path`.png.

    `style` is added to STYLE; its "svg.hashsalt" makes equal plots equal files. `transparent` is for the SVG. Returns
    the reason if nothing is written because matplotlib is missing, else None.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"matplotlib cannot be imported ({error}); pip install 'bagu[plot]' and run again"
    with matplotlib.rc_context({**STYLE, **style}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        undated = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(path.with_suffix(".svg"), transparent=transparent, metadata=undated)
        figure.set_layout_engine("none")  # keep the layout just solved: solving it again takes a third of the time
        figure.savefig(path.with_suffix(".png"), dpi=dpi)
    return None
