"""Draw the declared plot of a result: one style, one SVG and one PNG, without global state of matplotlib.

The SVG has no background. Its lines and text use INK and FAINT, which the report replaces with the colours of its light
or dark page. Both are readable on white, so the files can also be used alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagu.lab.plot import COLOURS, INK, Band, Bars, Colour, Ends, Heat, Line, Mark, Note, Panel, Rule, Stack
from bagu.runs.plot_style import write_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FILES = ("plot.svg", "plot.png")
STYLE = {
    "axes.grid": True,
    "axes.labelsize": 9,
    "axes.prop_cycle": f"cycler(color={list(COLOURS)})",
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "svg.fonttype": "none",  # text stays text: a third of the bytes, and the page's font
}
PLAIN_DECADES, WIDE = 3.5, 1.6  # the spans of a logarithmic axis with plain numbers, and of an x axis with 1, 2 and 5


def draw(name: str, panels: Sequence[Panel], folder: Path) -> str | None:
    """Write plot.svg and plot.png to `folder`. Returns the reason if they were not drawn, else None."""
    style = STYLE | {"svg.hashsalt": name}  # the same rows give the same file
    path = folder / Path(FILES[0]).stem
    return write_plot(lambda figure: compose(figure, panels), path, (9.0, 3.8), style, transparent=True, dpi=160)


def compose(figure: Figure, panels: Sequence[Panel]) -> None:
    ratios = [panel.width for panel in panels]
    first, *_ = every = figure.subplots(1, len(panels), width_ratios=ratios, squeeze=False)[0]
    below: dict[str, Any] = {}
    for axes, panel in zip(every, panels, strict=True):
        if panel.share_y and axes is not first:
            axes.sharey(first)
        groups, slot = sum(isinstance(mark, Bars) for mark in panel.marks), 0
        for mark in panel.marks:
            draw_mark(axes, mark, groups, slot)
            slot += isinstance(mark, Bars)
        frame(axes, panel)
        handles, labels = axes.get_legend_handles_labels()
        found = {label: handle for label, handle in zip(labels, handles, strict=True) if label not in below}
        if panel.legend == "below":
            below |= found
        elif panel.legend == "inside" and found:
            axes.legend(list(found.values()), list(found), fontsize=8 if len(found) < 5 else 7)
    if below:
        columns = min(len(below), 7 if max(map(len, below)) < 16 else 4)
        figure.legend(list(below.values()), list(below), loc="outside lower center", ncols=columns)


def frame(axes: Axes, panel: Panel) -> None:
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    for axis, scale, names in ((axes.xaxis, panel.xscale, panel.xnames), (axes.yaxis, panel.yscale, panel.ynames)):
        if names is not None:
            small = 7.5 if max(map(len, names), default=0) > 10 or len(names) > 6 else 9
            axis.set_ticks(range(len(names)), list(names), fontsize=small)
            axis.grid(visible=False)
        elif scale != "linear":
            logarithmic(axis, scale, tight=axis is axes.xaxis)
    many = panel.xnames and (len(panel.xnames) > 7 or len(panel.xnames) * max(map(len, panel.xnames)) > 50)
    if many and not any("\n" in name for name in panel.xnames or ()):
        axes.tick_params(axis="x", rotation=30)
    if panel.ynames is not None:
        axes.set_ylim(len(panel.ynames) - 0.5, -0.5)
    if panel.xlim is not None:
        axes.set_xlim(*panel.xlim)
    if panel.ylim is not None:
        axes.set_ylim(*panel.ylim)


def logarithmic(axis: Axis, scale: str, *, tight: bool) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    options: dict[str, float] = {"log2": {"base": 2.0}, "symlog": {"linthresh": 1.0}}.get(scale, {})
    axis._set_axes_scale("symlog" if scale == "symlog" else "log", **options)  # type: ignore[attr-defined]
    low, high = axis.get_data_interval()
    decades = math.log10(high / low) if 0 < low < high else 0.0
    if scale == "log" and decades <= PLAIN_DECADES:
        axis.set_major_locator(LogLocator(subs=(1,) if tight and decades > WIDE else (1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
    elif scale != "log":
        axis.set_major_formatter("{x:g}")


def chosen(colour: Colour) -> dict[str, Any]:
    if colour is None:
        return {}
    return {"color": COLOURS[colour % len(COLOURS)] if isinstance(colour, int) else colour}


def arms(y: Sequence[float], ends: Ends) -> list[list[float]]:
    """Matplotlib's form of intervals: distances below and above."""
    return [
        [v - low for v, (low, _) in zip(y, ends, strict=True)],
        [high - v for v, (_, high) in zip(y, ends, strict=True)],
    ]


def draw_mark(axes: Axes, mark: Mark, groups: int, slot: int) -> None:
    match mark:
        case Line():
            style = chosen(mark.colour) | ({} if mark.size is None else {"markersize": mark.size})
            style |= {"markerfacecolor": "none"} if mark.hollow else {}
            label = mark.label or None
            (line,) = axes.plot(mark.x, mark.y, mark.style, label=label, alpha=mark.alpha, **style)
            if mark.ends is not None:
                axes.errorbar(
                    mark.x,
                    mark.y,
                    arms(mark.y, mark.ends),
                    fmt="none",
                    ecolor=line.get_color(),
                    elinewidth=1.2,
                    capsize=2,
                )
        case Bars():
            draw_bars(axes, mark, groups, slot)
        case Band():
            axes.fill_between(mark.x, mark.low, mark.high, alpha=0.15, lw=0, **chosen(mark.colour))
        case Stack():
            colours = [COLOURS[i % len(COLOURS)] for i in range(len(mark.layers))]
            axes.stackplot(mark.x, list(mark.layers.values()), labels=list(mark.layers), colors=colours, alpha=0.85)
        case Heat():
            draw_heat(axes, mark)
        case Rule():
            on, span = (axes.axhline, axes.axhspan) if mark.axis == "y" else (axes.axvline, axes.axvspan)
            style = chosen(mark.colour)
            if mark.upto is None:
                on(mark.at, lw=1, ls=mark.style, label=mark.label or None, **style)
            else:
                span(mark.at, mark.upto, alpha=0.15, lw=0, label=mark.label or None, **style)
        case Note():
            x, y = (0.02 if v is None else v for v in (mark.x, mark.y))
            where = tuple("axes fraction" if v is None else "data" for v in (mark.x, mark.y))
            axes.annotate(
                mark.text,
                (x, y),
                mark.shift,
                xycoords=where,
                textcoords="offset points",
                fontsize=8,
                ha=mark.align,
                **chosen(mark.colour),
            )


def draw_bars(axes: Axes, mark: Bars, groups: int, slot: int) -> None:
    width = 0.8 / groups
    shown = [(i + width * (slot - (groups - 1) / 2), y) for i, y in enumerate(mark.y) if y is not None]
    places, heights = [p for p, _ in shown], [y for _, y in shown]
    style: dict[str, Any] = chosen(mark.colour)
    if mark.colour == "each":
        style = {"color": [COLOURS[i % len(COLOURS)] for i in range(len(shown))]}
    label, lengths = mark.label or None, [y - mark.bottom for y in heights]
    if mark.ends is not None:
        error = "xerr" if mark.sideways else "yerr"
        style |= {error: arms(heights, mark.ends), "ecolor": INK, "capsize": 2}
    if mark.sideways:
        axes.barh(places, lengths, 0.92 * width, mark.bottom, label=label, **style)
        axes.margins(x=0.15)
    else:
        axes.bar(places, lengths, 0.92 * width, mark.bottom, label=label, **style)
    none = [place for place, length in zip(places, lengths, strict=True) if length == 0]
    dots = (none, [mark.bottom] * len(none))
    axes.plot(*dots[:: -1 if mark.sideways else 1], ".", **chosen(None if mark.colour == "each" else mark.colour))
    for place, value in zip(places, heights, strict=True) if mark.text else ():
        at, shift = ((value, place), (3, -3)) if mark.sideways else ((place, value), (0, 2))
        align = "left" if mark.sideways else "center"
        axes.annotate(mark.text.format(value), at, shift, textcoords="offset points", fontsize=8, ha=align, color=INK)


def draw_heat(axes: Axes, mark: Heat) -> None:
    for y, line in enumerate(mark.percent):
        for x, share in enumerate(line):
            # From blue (none) over orange to red. 1 % already matters, so the scale is a root.
            colour: Any = "#0072b2" if share == 0 else (0.84, 0.37, 0.0, 0.35 + 0.65 * (share / 100) ** 0.5)
            axes.bar(x, 0.92, width=0.94, bottom=y - 0.46, color=colour)
            text = "0" if share == 0 else f"{share:.0f}" if share >= 1 else f"{share:.1f}"
            axes.text(x, y, text, ha="center", va="center", color="white" if share == 0 or share > 40 else "black")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
