"""`bagu tune report`, `missing` and `merge`: what the stores hold."""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bagu.bench.harness import plain, shown
from bagu.bench.tune_searches import Search, searches
from bagu.errors import ArgumentError, UnknownName
from bagu.machine.terminal import Terminal
from bagu.ops.catalogue import SPECS
from bagu.ops.tuning.lookup import find
from bagu.ops.tuning.missing import missing
from bagu.ops.tuning.source import source_hash
from bagu.ops.tuning.store import Kind, Store, kind_fields, merge, shipped_store, user_store, winners


def show_missing(console: Console | None = None, *, as_json: bool = False) -> None:
    """The listed calls that still find no tuning."""
    console = console or Terminal()
    known = winners(r for s in (shipped_store(), user_store()) for r in s.read("winner").records)
    found = [k for k in missing() if current(k) and find(k, known) is None]
    if as_json:
        print(json.dumps([kind_fields(k) for k in found], ensure_ascii=False))
        return
    if not found:
        console.print("every call on a tuned device found a tuning")
        return
    lines = [(k.op, k.step, k.dtype, " ".join(f"{n}{list(s)}" for n, s in k.shapes), k.device) for k in found]
    heads = ("op", "step", "dtype", "shapes", "device")
    console.print(plain(heads, lines, right=heads[2:]))
    console.print("[dim]`bagu tune ops NAME --sizes …` measures an op at other shapes[/]")


def merge_stores(files: Sequence[Path], console: Console | None = None) -> None:
    """Add the records of `files` to the user's store."""
    console = console or Terminal(highlight=False, soft_wrap=True)
    for path in files:
        if not path.is_file():
            raise ArgumentError(f"there is no tuning store {path}", hint="give files that `bagu tune ops` wrote")
    for path in files:
        found = Store(path).read()
        if not found.records:
            raise ArgumentError(f"{path} has no tuning record", hint="give files that `bagu tune ops` wrote")
        if found.problem is not None:
            console.print(found.problem)
    console.print(f"{merge([Store(path) for path in files], user_store())} records added to {user_store().path}")


def show_report(names: Sequence[str] = (), console: Console | None = None, *, as_json: bool = False) -> None:
    """All steps in one table, or each search of the named ops; then the totals.

    Columns: searches that found faster options, geometric mean and most of the gain over the defaults, mean regret
    against the whole space, time spent.
    """
    for name in names:
        if name not in SPECS:
            raise UnknownName.among("op", name, SPECS)
    console = console or Terminal(highlight=False)
    contents = [store.read() for store in (shipped_store(), user_store())]
    found = [s for s in searches(r for c in contents for r in c.records) if not names or s.winner.kind.op in names]
    if as_json:
        print(json.dumps({"searches": [facts(s) for s in found], "totals": totals(found)}, ensure_ascii=False))
        return
    for problem in (c.problem for c in contents if c.problem is not None):
        console.print(problem)
    if not found:
        console.print(f"no tuning is stored; `bagu tune ops` writes {user_store().path}")
        return
    usable = [s for s in found if current(s.winner.kind)]
    if usable:
        heads, lines = (EACH, _each(usable)) if names else (HEADS, steps_lines(usable))
        console.print(plain(heads, lines, right=heads[2:]))
    for line in sentences(usable):
        console.print(line)
    if len(usable) < len(found):
        console.print(f"{len(found) - len(usable)} results are stale: the source of the kernels changed since")


def current(kind: Kind) -> bool:
    """Whether the source of the kernels is still the one that was measured."""
    return kind.op in SPECS and source_hash(f"bagu.ops.{kind.op}.triton_backend") == kind.source


def facts(search: Search) -> dict[str, Any]:
    """A search as JSON values."""
    w = search.winner
    default = next((p.median_s for p in search.timed if not p.options), None)
    return {
        **kind_fields(w.kind), "dims": dict(w.dims), "options": dict(w.options), "verdict": w.verdict,
        "stale": not current(w.kind), "speedup": w.speedup, "default_s": default, "searched": w.searched,
        "space": w.space, "seconds": w.seconds, "regret": search.regret,
    }  # fmt: skip


def totals(found: Sequence[Search]) -> dict[str, Any]:
    """Sums and means over searches; None where nothing is known."""
    faster = [s.winner.speedup for s in found if s.winner.verdict == "faster"]
    points = [p for s in found for p in s.points]
    return {
        "searches": len(found),
        "faster": len(faster),
        "seconds": sum(s.winner.seconds for s in found),
        "compile_and_measure_seconds": sum(p.seconds for p in points),
        "points": sum(s.winner.space for s in found),
        "measured": sum(s.winner.searched for s in found),
        "gain_of_the_faster": statistics.geometric_mean(faster) if faster else None,
        "gain": statistics.geometric_mean([s.winner.speedup for s in found]) if found else None,
        "default_within_2_percent": sum(s.gap is not None and s.gap <= 1.02 for s in found),
        "whole_spaces": sum(s.whole for s in found),
        "mean_regret": _mean([s.regret for s in found]),
        "largest_regret": max((r for s in found if (r := s.regret) is not None), default=None),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def sentences(found: Sequence[Search]) -> list[str]:
    """The totals in words."""
    if not found:
        return []
    t = totals(found)
    words = [
        f"Time: {t['seconds']:.0f} s for {t['searches']} searches; {t['measured']} of {t['points']} sets of options "
        f"were measured{_dropped(found)}.",
        f"Gain: {t['faster']} of {t['searches']} searches found options that are faster than the defaults"
        + (f", by {t['gain_of_the_faster']:.3f}×; over all searches {t['gain']:.3f}×." if t["faster"] else ".")
        + f" The defaults are within 2 % of the fastest in {t['default_within_2_percent']}.",
    ]
    if t["mean_regret"] is not None:
        words.append(
            f"Regret: in {t['whole_spaces']} searches all options that can run were measured; the chosen ones are "
            f"{t['mean_regret']:.2%} slower than the best on average, {t['largest_regret']:.1%} at most."
        )
    return words


def _dropped(found: Sequence[Search]) -> str:
    """What was not measured, or not used, and why: ", 95 spill registers"."""
    reasons = {
        "compile": "do not compile",
        "resources": "need too many registers or too much shared memory",
        "spills": "spill registers",
        "roofline": "cannot be faster by the roofline",
        "failed": "failed",
        "wrong": "gave wrong results",
    }
    counts = Counter(p.status for s in found for p in s.points)
    return "".join(f", {counts[status]} {words}" for status, words in reasons.items() if counts[status])


HEADS = ("op", "step", "faster", "gain", "most", "regret", "time")


def steps_lines(found: Sequence[Search]) -> list[tuple[str, ...]]:
    """A line per step of an op, over its sizes, with the columns HEADS."""
    by_step: dict[tuple[str, str], list[Search]] = {}
    for s in found:
        by_step.setdefault((s.winner.kind.op, s.winner.kind.step), []).append(s)
    lines: list[tuple[str, ...]] = []
    for (op, step), own in sorted(by_step.items()):
        t, most = totals(own), max(s.winner.speedup for s in own)
        regret = shown(t["mean_regret"], "{:.1%}")
        gains = f"{t['gain']:.3f}×", f"{most:.2f}×"
        lines.append((op, step, f"{t['faster']} of {len(own)}", *gains, regret, f"{t['seconds']:.0f} s"))
    return lines


def _each(found: Sequence[Search]) -> list[tuple[str, ...]]:
    """A line per search: what was searched and chosen, then the columns of EACH."""
    lines: list[tuple[str, ...]] = []
    for s in found:
        w = s.winner
        sizes = (f"{k}={v}" for k, v in (*w.dims.items(), *w.kind.modes))
        words = ", ".join(f"{k}={v}" for k, v in w.options.items()) or f"default ({w.verdict})"
        lines.append(
            (
                " ".join([w.kind.op, w.kind.step, *sizes]),
                words,
                f"{w.speedup:.3f}×",
                shown(s.regret, "{:.1%}"),
                f"{w.searched}/{w.space}",
            )
        )
    return lines


EACH = ("search", "options", "gain", "regret", "measured")
