"""`bagu bench serve A --against B`: two servers, of any make, under the same load in turn.

A round sends the same prompts to both servers, one after the other; the next round has other prompts and the other
order. The ratio of a round is one measurement: load of the machine that lasts longer than a round affects both. The
result is the geometric mean of the ratios with its 95 % interval (eval/intervals.py).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from bagu.bench.harness import Rows, table
from bagu.bench.serve_load import Load, Target, run_load, same_prompts
from bagu.errors import ArgumentError
from bagu.eval import intervals

FIELDS = {
    "output_throughput": "output tokens/s",
    "request_goodput": "goodput, requests/s",
    "p50_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "p50_tpot_ms": "TPOT p50, ms",
    "p99_tpot_ms": "TPOT p99, ms",
    "p50_e2el_ms": "E2EL p50, ms",
}


def compare(targets: tuple[Target, Target], load: Load, rows: Rows, *, rounds: int) -> int:
    """Measure both servers `rounds` times in turn, print the ratios, write all rows. Returns 1 if requests failed."""
    if rounds < 2:
        raise ArgumentError(f"{rounds} rounds", hint="an interval needs 2 rounds or more")
    pair = same_prompts(*targets)
    measured: dict[str, list[dict[str, Any]]] = {"A": [], "B": []}
    for turn in range(rounds):
        now = replace(load, seed=load.seed + 2 * turn, warmups=load.warmups if turn == 0 else 0)
        for name in ("A", "B") if turn % 2 == 0 else ("B", "A"):
            row, _ = run_load(pair[name == "B"], now)
            rows.add([{**row, "system": "serve_compare", "server": name, "round": turn}])
            measured[name].append(row)
            rows.console.print(
                f"round {turn + 1}, {name}: {row['output_throughput']:,.0f} output tokens/s", style="dim"
            )
    rows.finish(*_show(pair, load, measured))
    return int(any(row["failed"] for found in measured.values() for row in found))


def ratio(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """B over A: the geometric mean over the rounds, and the ends of its 95 % interval."""
    found = intervals.estimate_ratio([math.log(y / x) for x, y in zip(a, b, strict=True)], [1.0] * len(a))
    return math.exp(found.mean), math.exp(found.low), math.exp(found.high)


def _show(
    pair: tuple[Target, Target], load: Load, measured: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Iterator[RenderableType]:
    rounds = len(measured["A"])
    for name, target in zip(("A", "B"), pair, strict=True):
        yield Text(f"{name}: {target.model} at {target.server.url}")
    first = measured["A"][0]
    yield Text(
        f"{load}, {rounds} rounds in turn, {first['num_prompts']} requests each; the same prompts for both, as "
        f"{first['prompts_are']}; {load.warmups} warm-up requests for each server before round 1, not counted; no "
        "answered request is left out"
    )
    lines = []
    for key, words in FIELDS.items():
        pairs = [(x[key], y[key]) for x, y in zip(measured["A"], measured["B"], strict=True) if x[key] and y[key]]
        if len(pairs) < 2:
            continue
        a, b = zip(*pairs, strict=True)
        mean, low, high = ratio(a, b)
        verdict = "too few rounds" if math.isnan(low) else "no difference shown" if low <= 1 <= high else "differs"
        missing = f", {rounds - len(pairs)} rounds without a value left out" if len(pairs) < rounds else ""
        lines.append(
            (
                words,
                *(f"{math.exp(sum(map(math.log, values)) / len(values)):,.2f}" for values in (a, b)),
                f"{mean:.3f}",
                "–" if math.isnan(low) else f"{low:.3f} to {high:.3f}",
                verdict + missing,
            )
        )
    yield table("", ("geometric mean", "A", "B", "B / A", "95 % interval", ""), lines)
    for name, found in measured.items():
        for error in sorted({e for row in found for e in row["errors"]}):
            yield Text(f"failed on {name}: {error}", style="red")
