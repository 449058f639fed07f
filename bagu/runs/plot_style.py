"""One plot style for benchmarks, labs and reports."""

__all__ = ["FAINT", "INK", "STYLE"]

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
