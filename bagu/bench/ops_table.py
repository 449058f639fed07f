"""The output of the benchmark: heading, ceilings, a table per case, and remarks. Fits 80 columns."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from bagu.bench.implementations import label
from bagu.bench.roofline import FAULT, PASSES
from bagu.bench.units import duration, si
from bagu.machine.ceilings import Ceilings

Row = Mapping[str, Any]

COLUMNS = {"pass": 7, "by": 13, "median": 10, "spread": 6, "rate": 12, "of ceiling": 12, "vs best peer": 13}


def heading(env: Mapping[str, Any], device: torch.device, *, quick: bool) -> str:
    kind = "  ·  [yellow]quick: one case per op, small sizes[/]" if quick else ""
    return (
        f"[bold]{escape(env['machine'])}[/] ({device})  ·  torch {env['torch']}  ·  "
        f"triton {env['triton'] or 'not installed'}  ·  commit {(env['commit'] or 'none')[:9]}{kind}"
    )


def ceilings_line(c: Ceilings) -> str:
    words = "  ·  ".join(f"{name} {si(getattr(c, name), 'B/s')}" for name in ("read", "write", "copy"))
    return f"measured ceilings: {words}  ·  matmul {si(c.matmul, 'FLOP/s')} ({c.dtype})"


def row_label(row: Row) -> str:
    """The displayed name of the implementation of this row."""
    return label(row["backend"] or row["peer"], backend=row["backend"] is not None)


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """One table per case of an op; implementations of the same pass are together.

    The last column is the speed of a bagu backend relative to the best peer; ~ means that their spreads overlap. The
    ceilings that the fractions refer to are below the table.
    """
    for index, (_, group) in enumerate(groupby(rows, key=lambda r: r["case"])):
        mine = sorted(group, key=lambda r: PASSES.index(r["pass"]))
        title = f"[bold]{mine[0]['op']}[/]  {escape(mine[0]['case'])}  {mine[0]['shape']}  {mine[0]['dtype']}"
        grid = Table(
            title=title,
            title_justify="left",
            title_style="",
            box=None,
            padding=(0, 1, 0, 0),
            header_style="dim",
            show_header=index == 0,
        )
        for name, width in COLUMNS.items():
            grid.add_column(name, width=width, justify="left" if name in ("pass", "by") else "right", no_wrap=True)
        for before, row in zip((None, *mine), mine, strict=False):
            step = row["pass"] if before is None or before["pass"] != row["pass"] else ""
            who = f"[bold]{row_label(row)}[/]" if row["backend"] else row_label(row)
            grid.add_row(step, who, *_numbers(row, rows))
        grid.caption, grid.caption_justify = _divisors(mine), "left"
        yield grid


def _divisors(rows: Sequence[Row]) -> str:
    """The ceilings that the fractions of these rows refer to; they may be measured again during a run."""
    used = {
        (row["ceiling"], row["ceilings"][row["ceiling"]], "FLOP/s" if row["ceiling"] == "matmul" else "B/s")
        for row in rows
        if row["share"] is not None
    }
    return "; ".join(f"{name} ceiling {si(value, unit)}" for name, value, unit in sorted(used))


def meaningless(row: Row, other: Row) -> bool:
    """Whether the spreads of two measurements overlap, which makes their ratio meaningless."""
    return bool(row["low_s"] <= other["high_s"] and other["low_s"] <= row["high_s"])


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
    about = "~" if best and meaningless(row, best) else ""
    against = f"{about}{times:.{1 if times >= 10 else 2}f}× {best['peer']}" if best else ""
    return [duration(row["median_s"]), spread, rate, share, against]


def _rate(row: Row) -> str:
    if row["bound"] == "memory":
        return si(1e9 * row["gb_per_s"], "B/s")
    return si(1e12 * row["tflop_per_s"], "FLOP/s")


def best_peer(row: Row, rows: Sequence[Row]) -> Row | None:
    """The fastest peer that did the same work as this row."""
    peers = [r for r in _same_work(row, rows) if r["peer"] and not r["yardstick"]]
    return min(peers, key=lambda r: r["median_s"], default=None)


def _same_work(row: Row, rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if r["median_s"] and (r["case"], r["pass"]) == (row["case"], row["pass"])]


def _host(rows: Sequence[Row]) -> Iterator[str]:
    """The host time of a call, one line per pass."""
    for step in PASSES:
        timed = [r for r in rows if r["pass"] == step and r.get("host_s") is not None]
        if timed:
            by = ", ".join(f"{row_label(r)} {1e6 * r['host_s']:.1f} us" for r in timed)
            yield f"host time of a tiny {step}{' without a graph' if step == 'fwd' else ''}: {escape(by)}"


def remarks(rows: Sequence[Row]) -> Iterator[str]:
    """Host times, faults, failures, meaningless ratios, and the speed of each backend relative to the yardsticks."""
    yield from _host(rows)
    for row in rows:
        where = escape(f"{row['op']}[{row['case']}] {row['pass']} by {row_label(row)}")
        if row["fault"]:
            yield (
                f"[red]measurement fault[/]  {where}: {duration(row['median_s'])} is more than "
                f"{100 * FAULT - 100:.0f} % faster than its reads and writes allow; do not use this number"
            )
        if row["error"]:
            yield f"[yellow]failed[/]  {where}: {escape(row['error'])}"
        for stick in (r for r in _same_work(row, rows) if row["backend"] and r["yardstick"]):
            if row["median_s"]:
                memory = f", {row['peak_bytes'] / 1e9:.2f} GB peak memory" if row["peak_bytes"] is not None else ""
                speed = stick["median_s"] / row["median_s"]
                yield f"{where} has {speed:.3f}× the speed of {escape(stick['peer'])}{memory}"
    if any(row["backend"] and row["median_s"] and (p := best_peer(row, rows)) and meaningless(row, p) for row in rows):
        yield "[dim]~: the spreads overlap, so the ratio is meaningless; measure again on an idle machine[/]"
