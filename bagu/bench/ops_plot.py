"""One plot per op: a subplot per pass, a group of bars per case, the measured ceiling as a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagu.bench.ops_table import row_label
from bagu.runs.plot_style import INK, write_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# blues; peers use the other colours of Okabe and Ito's colour-blind-safe palette
OURS = ("#0072b2", "#56b4e9")
PEERS = ("#e69f00", "#d55e00", "#009e73", "#cc79a7")
UNITS = {"memory": ("GB/s", "bytes", 1e9, "copy"), "compute": ("TFLOP/s", "flops", 1e12, "matmul")}

Row = Mapping[str, Any]


def draw(rows: Sequence[Row], folder: Path) -> str | None:
    """Write `folder`/<op>.svg and .png from the rows of one op. Returns the reason if nothing was drawn, else None."""
    rows = [r for r in rows if r["median_s"] and r["share"] is not None]
    if not rows:
        return "no row has a rate"
    op = rows[0]["op"]
    passes, cases, colours = _distinct(rows, "pass"), _distinct(rows, "case"), _colours(rows)
    size = (max(7.0, 1.5 + 1.25 * len(cases)), 1.6 + 1.9 * len(passes))

    def plot(figure: Figure) -> None:
        from matplotlib.patches import Patch

        subplots = figure.subplots(len(passes), 1, sharex=True, squeeze=False)[:, 0]
        for axes, step in zip(subplots, passes, strict=True):
            _draw_pass(axes, [r for r in rows if r["pass"] == step], cases, colours)
            axes.set_title(step)
        shapes = {r["case"]: r["shape"].replace(" ", "\n", 1) for r in rows}
        subplots[-1].set_xticks(range(len(cases)), [f"{case}\n{shapes[case]}" for case in cases])
        handles = [Patch(color=colour, label=who) for who, colour in colours.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5))
        r = rows[0]
        figure.suptitle(f"{op}  ·  {r['dtype']}  ·  {r['env']['machine']}", x=0.01, ha="left", fontsize=11)

    return write_plot(plot, folder / op, size, {"svg.hashsalt": op})  # the same rows give the same file


def _draw_pass(axes: Any, rows: Sequence[Row], cases: Sequence[str], colours: Mapping[str, str]) -> None:
    unit, work, scale, ceiling = UNITS[rows[0]["bound"]]
    slot = 0.8 / len(colours)
    for at, (who, colour) in enumerate(colours.items()):
        mine = {r["case"]: r for r in rows if row_label(r) == who}
        x = [i - 0.4 + (at + 0.5) * slot for i, case in enumerate(cases) if case in mine]
        y = [mine[case][work] / mine[case]["median_s"] / scale for case in cases if case in mine]
        fills = ["none" if mine[case]["fault"] else colour for case in cases if case in mine]  # a fault has no fill
        axes.bar(x, y, width=0.92 * slot, color=fills, edgecolor=colour)
    top = rows[-1]["ceilings"][ceiling] / scale
    axes.axhline(top, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    digits = 0 if top >= 10 else 2
    axes.annotate(
        f"{ceiling} {top:,.{digits}f} {unit}",
        (1.0, top),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    axes.set_ylabel(unit)
    axes.set_ylim(0, 1.12 * max([top, *(r[work] / r["median_s"] / scale for r in rows)]))
    axes.grid(axis="y")
    axes.tick_params(length=0)


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    """A colour per implementation, in the order they ran: bagu's backends first."""
    ours = _distinct([{"who": row_label(r)} for r in rows if r["backend"]], "who")
    peers = _distinct([{"who": row_label(r)} for r in rows if r["peer"]], "who")
    return dict(zip(ours, OURS, strict=False)) | {p: PEERS[i % len(PEERS)] for i, p in enumerate(peers)}


def _distinct(rows: Sequence[Row], key: str) -> list[str]:
    return list(dict.fromkeys(r[key] for r in rows))
