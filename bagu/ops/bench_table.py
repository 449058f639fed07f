"""The benchmark in words: heading, ceilings, a table per case, a line for each thing to look at. Fits 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from bagu.ops.contenders import label
from bagu.ops.roofline import FAULT, PASSES
from bagu.timing import Ceilings

__all__ = ["ceilings_line", "heading", "remarks", "row_label", "tables"]

Row = Mapping[str, Any]

COLUMNS = {"pass": 7, "by": 13, "median µs": 10, "spread": 6, "rate": 12, "of ceiling": 12, "vs best peer": 13}


def heading(env: Mapping[str, Any], device: torch.device, *, quick: bool) -> str:
    kind = "  ·  [yellow]quick: one case an op, small sizes[/]" if quick else ""
    return (
        f"[bold]{escape(env['machine'])}[/] ({device})  ·  torch {env['torch']}  ·  "
        f"triton {env['triton'] or 'not installed'}  ·  commit {(env['commit'] or 'none')[:9]}{kind}"
    )


def ceilings_line(c: Ceilings) -> str:
    gb = {name: f"{getattr(c, name) / 1e9:,.1f} GB/s" for name in ("read", "write", "copy")}
    words = "  ·  ".join(f"{name} {rate}" for name, rate in gb.items())
    return f"measured ceilings: {words}  ·  matmul {c.matmul / 1e12:,.2f} TFLOP/s ({c.dtype})"


def row_label(row: Row) -> str:
    """Who made this row, as people read it."""
    return label(row["backend"] or row["peer"], backend=row["backend"] is not None)


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """One op's rows, a table per case, contenders of one pass together.

    The last column says how many times as fast as the best peer a backend of bagu is.
    """
    for index, (_, group) in enumerate(groupby(rows, key=lambda r: r["case"])):
        mine = sorted(group, key=lambda r: PASSES.index(r["pass"]))
        title = f"[bold]{mine[0]['op']}[/]  {escape(mine[0]['case'])}  {mine[0]['shape']}  {mine[0]['dtype']}"
        grid = Table(title=title, title_justify="left", title_style="", box=None, padding=(0, 1, 0, 0),
                     header_style="dim", show_header=index == 0)  # fmt: skip
        for name, width in COLUMNS.items():
            grid.add_column(name, width=width, justify="left" if name in ("pass", "by") else "right", no_wrap=True)
        for before, row in zip((None, *mine), mine, strict=False):
            step = row["pass"] if before is None or before["pass"] != row["pass"] else ""
            who = f"[bold]{row_label(row)}[/]" if row["backend"] else row_label(row)
            grid.add_row(step, who, *_numbers(row, rows))
        yield grid


def _numbers(row: Row, rows: Sequence[Row]) -> list[str]:
    if row["median_s"] is None:
        return ["[yellow]failed[/]"]
    spread = f"{100 * (row['high_s'] - row['low_s']) / row['median_s']:.0f} %"
    rate = share = ""
    if row["share"] is not None:
        rate = _rate(row)
        share = f"{100 * row['share']:.0f} % {row['ceiling']}"
        share = f"[red]{share}[/]" if row["fault"] else share
    best = best_peer(row, rows) if row["backend"] else None
    times = best["median_s"] / row["median_s"] if best else 0.0
    against = f"{times:.{1 if times >= 10 else 2}f}× {best['peer']}" if best else ""
    return [f"{1e6 * row['median_s']:,.1f}", spread, rate, share, against]


def _rate(row: Row) -> str:
    if row["bound"] == "memory":
        value, unit = row["gb_per_s"], "GB/s"
    else:
        value, unit = (
            (row["tflop_per_s"], "TFLOP/s") if row["tflop_per_s"] >= 1 else (1e3 * row["tflop_per_s"], "GFLOP/s")
        )
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}" if value >= 1 else f"{value:.2f} {unit}"


def best_peer(row: Row, rows: Sequence[Row]) -> Row | None:
    """The fastest peer that did the work of this row."""
    peers = [r for r in _same_work(row, rows) if r["peer"] and not r["yardstick"]]
    return min(peers, key=lambda r: r["median_s"], default=None)


def _same_work(row: Row, rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if r["median_s"] and (r["case"], r["pass"]) == (row["case"], row["pass"])]


def remarks(rows: Sequence[Row]) -> Iterator[str]:
    """Faults, failures, and each backend's time in units of the yardsticks."""
    for row in rows:
        where = escape(f"{row['op']}[{row['case']}] {row['pass']} by {row_label(row)}")
        if row["fault"]:
            yield (
                f"[red]fault of the measurement[/]  {where} in {1e6 * row['median_s']:,.1f} µs is more than "
                f"{100 * FAULT - 100:.0f} % over what its reads and writes can take; do not use this number"
            )
        if row["error"]:
            yield f"[yellow]failed[/]  {where}: {escape(row['error'])}"
        for stick in (r for r in _same_work(row, rows) if row["backend"] and r["yardstick"]):
            if row["median_s"]:
                memory = f", {row['peak_bytes'] / 1e9:.2f} GB at its peak" if row["peak_bytes"] is not None else ""
                times = row["median_s"] / stick["median_s"]
                yield f"{where} takes {times:.3f}× the time of {escape(stick['peer'])}{memory}"
