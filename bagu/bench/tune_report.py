"""`bagu tune report` and `bagu tune missing`: what the stores hold."""

from __future__ import annotations

import statistics

from rich.console import Console

from bagu.bench.harness import table
from bagu.bench.units import duration
from bagu.ops.catalogue import SPECS
from bagu.ops.tuning.source import source_hash
from bagu.ops.tuning.store import Kind, Measurement, Winner, missing, shipped_store, user_store, winners

__all__ = ["show_missing", "show_report"]


def show_missing(console: Console | None = None) -> None:
    console, found = console or Console(), missing()
    if not found:
        console.print("every call on a tuned device found a tuning")
        return
    lines = [(k.op, k.step, k.dtype, " ".join(map(_shape, k.shapes)), k.device) for k in found]
    console.print(table("calls without a tuning", ("op", "step", "dtype", "shapes", "device"), lines))
    console.print("[dim]`bagu tune ops NAME` measures an op's benchmark cases[/]")


def show_report(console: Console | None = None) -> None:
    console, stores = console or Console(width=100), [shipped_store(), user_store()]
    records = [r for s in stores for r in s.records()]
    measured = [r for r in records if isinstance(r, Measurement)]
    found = list(winners(stores).values())
    unreadable = sum(s.unreadable() for s in stores)
    if not found:
        console.print(f"no tuning is stored; `bagu tune ops` writes {user_store().path}")
        return
    lines = [
        (*_names(w.kind), _options(w), f"{w.speedup:.3f}", f"{w.searched}/{w.space}", duration(w.seconds))
        for w in found
    ]
    heads = ("op", "step", "dtype", "shapes", "options", "speed-up", "measured", "time")
    console.print(table("tunings", heads, lines))
    faster = [w.speedup for w in found if w.options]
    gain = f", geometric mean {statistics.geometric_mean(faster):.3f}x" if faster else ""
    console.print(f"{len(faster)} of {len(found)} are faster than the default{gain}")
    stale = [w for w in found if not _current(w.kind)]
    for count, words in (
        (len(stale), "results are stale: the kernel's source changed since"),
        (sum(m.status != "ok" for m in measured), "sets of options did not compile, spilled registers or were wrong"),
        (unreadable, "lines are damaged or of another version, and are skipped"),
    ):
        if count:
            console.print(f"{count} {words}")


def _current(kind: Kind) -> bool:
    return kind.op in SPECS and source_hash(f"bagu.ops.{kind.op}.triton_backend") == kind.source


def _names(kind: Kind) -> tuple[str, str, str, str]:
    return kind.op, kind.step, kind.dtype, _shape(kind.shapes[0])


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _options(winner: Winner) -> str:
    return ", ".join(f"{k}={v}" for k, v in winner.options.items()) or "default"
