"""`python -m benchmarks.tools.tune_ship STORE`: make the store that ships with the package from one that was measured.

It keeps the last result of each search that is not stale, and one line for each set of options instead of one for each
round. Results of other devices in the shipped store stay; those of the same kind of call are replaced.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from bagu.bench.tune_report import current
from bagu.bench.tune_searches import Key
from bagu.errors import ArgumentError
from bagu.ops.tuning.store import Kind, Measurement, Record, Store, shipped_store, winners


def summarized(records: Iterable[Record]) -> list[Record]:
    """The last result of each search, and one measurement for each set of options instead of one for each round."""
    kept = list(records)
    last = winners(kept)
    found: dict[tuple[Kind, Key], list[Measurement]] = {}
    for m in (r for r in kept if isinstance(r, Measurement) and r.kind in last):
        found.setdefault((m.kind, tuple(m.options.items())), []).append(m)
    return [*(_combined(own) for own in found.values()), *last.values()]


def _combined(own: Sequence[Measurement]) -> Measurement:
    def median(name: str) -> float | None:
        values = [getattr(m, name) for m in own if getattr(m, name) is not None]
        return statistics.median(values) if values else None

    return replace(
        own[-1], median_s=median("median_s"), low_s=median("low_s"), high_s=median("high_s"),
        samples=sum(m.samples for m in own), seconds=sum(m.seconds for m in own),
    )  # fmt: skip


def ship(source: Store, target: Store, without: Sequence[str] = ()) -> int:
    """Write the summary of both stores to `target`; return the number of its records."""
    if not source.path.is_file():
        raise ArgumentError(f"there is no tuning store {source.path}", hint="give a file that `bagu tune ops` wrote")
    records = [*target.records(), *source.records()]
    kept = [r for r in summarized(records) if current(r.kind) and r.kind.op not in without]
    made = Store(target.path.with_suffix(".new"))
    made.path.write_text("")
    for record in kept:
        made.append(record)
    made.path.replace(target.path)
    return len(kept)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tools.tune_ship", description="make the shipped tuning store"
    )
    parser.add_argument("store", type=Path, help="a store that `bagu tune ops` wrote")
    parser.add_argument("--without", nargs="*", default=[], metavar="OP", help="ops to leave out")
    parser.add_argument("--out", type=Path, default=shipped_store().path, help="default: the store in the package")
    asked = parser.parse_args(argv)
    print(f"{ship(Store(asked.store), Store(asked.out), asked.without)} records in {asked.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
