"""The chart of the READMEs: every op on a GPU beside its best peer, from benchmarks/results. In docs/pictures/ops.png.

python -m benchmarks.tools.chart
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagu.runs.plot_style import FAINT, INK, write_plot
from bagu.runs.record import read_rows
from benchmarks.tools.tables import latest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
MACHINE = "nvidia-h200"
OWN = ("bagu_attention", "four_gemms", "three_gemms")  # not peers: bagu's own op, and bounds
FASTER, SLOWER = "#2f6fb5", "#c8553d"


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """By op, for each case: the time of the fastest peer divided by bagu's, of forward and backward together where the
    op has a backward. A case without a peer is left out."""
    work: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in latest([dict(r) for r in rows if not r["quick"] and r["device"].startswith("cuda")]):
        if row["median_s"] is None or row["fault"] or row["peer"] in OWN or row["backend"] == "torch":
            continue
        by_pass = work.setdefault((row["op"], row["case"]), {}).setdefault(row["pass"], {})
        by_pass[row["peer"] or "bagu"] = row["median_s"]
    found: dict[str, list[float]] = {}
    for (op, _), passes in work.items():
        times = passes.get("fwd+bwd") or passes.get("fwd") or {}
        peers = [seconds for name, seconds in times.items() if name != "bagu"]
        if peers and "bagu" in times:
            found.setdefault(op, []).append(min(peers) / times["bagu"])
    return found


def draw(figure: Figure, found: Mapping[str, Sequence[float]]) -> None:
    """A bar per op: the median of its cases, and the range as a line."""
    ops = sorted(found, key=lambda op: statistics.median(found[op]))
    axes = figure.add_subplot()
    for place, op in enumerate(ops):
        middle = statistics.median(found[op])
        axes.barh(place, middle - 1, left=1, color=FASTER if middle >= 1 else SLOWER, height=0.6)
        axes.plot([min(found[op]), max(found[op])], [place, place], color=INK, linewidth=1)
    axes.set_xscale("log", base=2)
    ticks = (0.5, 1, 2, 4, 8)
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.set_yticks(range(len(ops)), ops)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.grid(axis="x", color=FAINT)
    axes.margins(y=0.01)
    axes.set_title("Speed beside the fastest peer, H200, bf16: median of an op's cases, and their range")


def main() -> None:
    found = ratios(read_rows(ROOT / f"benchmarks/results/{MACHINE}.jsonl"))
    out = ROOT / "docs/pictures/ops"
    reason = write_plot(lambda figure: draw(figure, found), out, (8.5, 0.17 * len(found) + 0.8), {})
    if reason is not None:
        raise SystemExit(reason)
    out.with_suffix(".svg").unlink()  # the READMEs show the picture as PNG
    above = sum(statistics.median(values) >= 1 for values in found.values())
    print(f"{above} of {len(found)} ops at least as fast as the fastest peer → {out}.png")


if __name__ == "__main__":
    main()
