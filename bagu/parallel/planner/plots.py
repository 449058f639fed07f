"""Plots of a plan (memory bars, time split, Pareto front) and of the validation (predicted against measured)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bagu.parallel.planner.explain import CAUSES
from bagu.parallel.planner.rows import JUDGE
from bagu.parallel.planner.validate import Compared
from bagu.runs.plot_style import FAINT, INK, write_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bagu.parallel.plan import Plan

# Okabe and Ito's colour-blind-safe palette
PALETTE = ("#0072b2", "#56b4e9", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#f0c040", "#7a5195", "#8c8c8c", "#bbbbbb")
GiB = 2**30
SHOWN = 8  # layouts in the bars


def draw_plan(plan: Plan, path: Path, title: str) -> str | None:
    """Write `path`.svg and .png. Returns the reason if nothing was drawn, else None."""

    def plot(figure: Figure) -> None:
        left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
        shown = plan.distinct(SHOWN)
        names = [choice.layout.words().replace(" · micro-batch", "\nmicro-batch") for choice in shown]
        _bars(left, names, [{k: v / GiB for k, v in c.memory_bytes.items()} for c in shown], "GiB per GPU")
        left.axvline(plan.cluster.gpu.memory_gib, color=INK, lw=1, ls=":")
        split = [{CAUSES[k]: v for k, v in c.seconds.items()} for c in shown]
        _bars(middle, [""] * len(shown), split, "seconds per step")
        _pareto(right, plan)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)

    return write_plot(plot, path, (13, 4.6), {"svg.hashsalt": title})


def _bars(axes: Any, names: Sequence[str], bars: Sequence[dict[str, float]], label: str) -> None:
    """Stacked horizontal bars, best on top; parts below 0.5 % of every bar are left out of the legend."""
    left = np.zeros(len(bars))
    for part, colour in zip(bars[0], PALETTE, strict=False):
        values = np.array([bar[part] for bar in bars])
        if (values > 0.005 * np.array([sum(bar.values()) for bar in bars])).any():
            axes.barh(range(len(bars)), values, left=left, color=colour, label=part, height=0.7)
        left += values
    axes.set(xlabel=label, ylim=(len(bars) - 0.4, -0.6))
    axes.set_yticks(range(len(bars)), names, fontsize=6)
    axes.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)


def _pareto(axes: Any, plan: Plan) -> None:
    memory = plan.needs.total[plan.fits] / GiB
    times = plan.times.total
    near = times < 3 * times.min()
    axes.scatter(memory[near], times[near], s=3, color=FAINT, label="layouts")
    order = np.argsort(memory, kind="stable")
    lowest = np.minimum.accumulate(times[order])
    front = order[times[order] <= lowest]
    front = front[times[front] < 3 * times.min()]
    axes.plot(memory[front], times[front], color=PALETTE[0], marker="o", ms=3, lw=1.2, label="Pareto front")
    axes.set(xlabel="GiB per GPU", ylabel="seconds per step", yscale="log")
    axes.legend(fontsize=7)


def draw_validation(done: Sequence[Compared], path: Path) -> str | None:
    """Predicted against measured throughput, and BLOOM's layouts in the measured order."""

    def plot(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for name, colour in zip((None, *JUDGE), ("#bbbbbb", *PALETTE[:1], *PALETTE[2:]), strict=False):
            mine = [x for x in done if x.row.judge == name]
            seconds = [(x.row.measured_s or 0, x.predicted_s) for x in mine]
            label = "calibration rows" if name is None else name
            left.scatter(*zip(*seconds, strict=True), s=9, color=colour, label=f"{label} ({len(mine)})")
        ends = np.array([0.15, 400])
        left.plot(ends, ends, color=INK, lw=0.8)
        left.fill_between(ends, ends * 0.88, ends * 1.12, color=FAINT, alpha=0.5, lw=0, label="±12 %")
        left.set(xscale="log", yscale="log", xlabel="measured seconds per step", ylabel="predicted")
        left.legend(fontsize=7)
        bloom = [x for x in done if x.row.cluster_name == "jean-zay" and x.row.workload.model.num_heads == 64]
        bloom = sorted((x for x in bloom if x.row.model == "181B"), key=lambda x: -x.row.tokens_per_s)
        right.plot([x.row.tokens_per_s / 1000 for x in bloom], color=INK, marker="o", ms=3, label="measured")
        right.plot(
            [x.predicted_tokens_per_s / 1000 for x in bloom], color=PALETTE[4], marker="o", ms=3, label="predicted"
        )
        words = [f"{x.row.layout.dp}·{x.row.layout.tp}·{x.row.layout.pp} m{x.row.layout.micro_batch}" for x in bloom]
        right.set_xticks(range(len(bloom)), words, rotation=90, fontsize=6)
        right.set(ylabel="thousand tokens/s", title="BLOOM 14336×72 after 02-25: dp·tp·pp, micro-batch")
        right.legend(fontsize=7)

    return write_plot(plot, path, (12, 4.6), {"svg.hashsalt": "planner-validation"})
