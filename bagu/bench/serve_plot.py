"""Plots of a load (distribution of latencies, timeline of requests) and of a sweep (latency against throughput)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagu.bench.serve_client import Answer
from bagu.bench.serve_latency import samples
from bagu.runs.plot_style import FAINT, write_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def draw_sweep(points: Sequence[tuple[str, Mapping[str, Any]]], kind: str, folder: Path, title: str) -> str | None:
    """Write `folder`/sweep.svg and .png: TTFT and TPOT against output tokens per second, a mark for each point of the
    sweep. Returns the reason if nothing was drawn, else None."""
    answered = [(name, row) for name, row in points if row["p50_ttft_ms"] is not None]
    if not answered:
        return "no request was answered"

    def plot(figure: Figure) -> None:
        for axes, metric in zip(figure.subplots(1, 2), ("ttft", "tpot"), strict=True):
            _latency_by_throughput(axes, answered, metric, kind)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)

    return write_plot(plot, folder / "sweep", (10, 4), {"svg.hashsalt": title})


def _latency_by_throughput(axes: Any, points: Sequence[tuple[str, Mapping[str, Any]]], metric: str, kind: str) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    some = [(name, row) for name, row in points if row[f"p50_{metric}_ms"] is not None]
    rate = [row["output_throughput"] for _, row in some]
    for p, dashes in ((50, "-"), (99, "--")):
        ms = [row[f"p{p}_{metric}_ms"] for _, row in some]
        axes.plot(rate, ms, f"o{dashes}", color=COLOURS[metric], markersize=4, label=f"p{p}")
    for (name, row), x in zip(some, rate, strict=True):
        place = (x, row[f"p99_{metric}_ms"])
        axes.annotate(name, place, xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8)
    limit = (some[0][1]["goodput"] or {}).get(metric) if some else None
    if limit is not None:
        axes.axhline(limit, color=COLOURS["e2el"], linewidth=1, linestyle=":", label=f"limit {limit:g} ms")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.margins(y=0.12)
    axes.set(title=f"{metric.upper()} by throughput; numbers are {kind}", xlabel="output tokens/s", ylabel="ms")
    axes.grid(True)
    axes.legend()
