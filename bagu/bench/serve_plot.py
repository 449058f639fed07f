"""Plot of a load: the distribution of latencies, and a timeline of the requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagu.bench.serve_client import Answer
from bagu.bench.serve_latency import samples
from bagu.runs.plot_style import FAINT, write_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw"]

COLOURS = {"ttft": "#e69f00", "tpot": "#009e73", "itl": "#cc79a7", "e2el": "#0072b2"}


def draw(answers: Sequence[Answer], folder: Path, title: str) -> str | None:
    """Write `folder`/serve.svg and .png. Returns the reason if nothing was drawn, else None."""
    done = sorted((a for a in answers if a.error is None and a.times), key=lambda a: a.asked)
    if not done:
        return "no request was answered"

    def plot(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _distributions(left, done)
        _timeline(right, done)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)

    return write_plot(plot, folder / "serve", (10, 4), {"svg.hashsalt": title})


def _distributions(axes: Any, answers: Sequence[Answer]) -> None:
    for name, seconds in samples(answers).items():
        if seconds:
            ms = sorted(1e3 * s for s in seconds)
            share = [100 * (i + 1) / len(ms) for i in range(len(ms))]
            axes.step(ms, share, where="post", color=COLOURS[name], label=name.upper())
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(title="Latency", xlabel="ms", ylabel="% of samples below", ylim=(0, 101))
    axes.grid(True)
    axes.legend(loc="lower right")


def _timeline(axes: Any, answers: Sequence[Answer]) -> None:
    zero, rows = answers[0].asked, range(len(answers))
    asked = [a.asked - zero for a in answers]
    first, last = [a.times[0] - zero for a in answers], [a.times[-1] - zero for a in answers]
    axes.hlines(rows, asked, first, color=FAINT, label="waiting for the first token")
    axes.hlines(rows, first, last, color=COLOURS["e2el"], label="is answered")
    axes.set(title="Requests", xlabel="s", ylabel="request, in sending order")
    axes.legend(loc="upper left")
