"""The text that `bagu bench serve` prints: one load, or the points of a sweep."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from bagu.bench.harness import table
from bagu.bench.serve_client import Answer
from bagu.bench.serve_latency import METRICS
from bagu.bench.serve_load import Load

Row = Mapping[str, Any]
ENOUGH = 0.9  # the share of requests within the limits that a sweep asks for
GAIN = 1.05  # a point that has less than this times the throughput of the one before is past saturation


def show_load(load: Load, row: Row, answers: Sequence[Answer], no_plot: str | None) -> Iterator[RenderableType]:
    yield Text(
        f"{row['model_id']}, {load}: {row['completed']} of {row['num_prompts']} requests in "
        f"{row['duration']:.2f} s; {row['inputs']} tokens in, {row['outputs']} out, prompts as {row['prompts_are']}"
    )
    yield (
        f"{row['request_throughput']:.2f} requests/s, {row['output_throughput']:,.0f} output tokens/s, "
        f"{row['total_token_throughput']:,.0f} tokens/s in and out"
    )
    if row["request_goodput"] is not None:
        yield f"goodput {row['request_goodput']:.2f} requests/s within {_limits(row)}"
    if row["server_cpu_us_per_token"] is not None:
        yield f"server CPU {row['server_cpu_us_per_token']:.0f} µs per token; {row['where']}"
    if row["p50_engine_ttft_ms"] is not None and row["p50_ttft_ms"] is not None:
        over = row["p50_ttft_ms"] - row["p50_engine_ttft_ms"]
        yield f"TTFT p50 {row['p50_ttft_ms']:.2f} ms = engine {row['p50_engine_ttft_ms']:.2f} + HTTP {over:.2f}"
    kinds = ("mean", "p50", "p90", "p99")
    values = {name: [row[f"{kind}_{name}_ms"] for kind in kinds] for name in METRICS}
    yield table(
        "",
        ("ms", *kinds),
        [
            (f"{name.upper()} {words}", *("–" if v is None else f"{v:,.2f}" for v in values[name]))
            for name, words in METRICS.items()
        ],
    )
    yield from map(Text, counted(row))
    for error in row["errors"]:
        yield Text(f"failed: {sum(a.error == error for a in answers)} × {error}", style="red")
    if no_plot is not None:
        yield Text(f"no plot: {no_plot}", style="dim")


def counted(row: Row) -> Iterator[str]:
    """What is in the numbers and what is not."""
    yield f"warm-up: {row['warmups']} requests before the load, not counted"
    left_out = row.get("left_out") or []
    yield "left out: " + ("; ".join(f"{why} (of the trace)" for why in left_out) or "no request")
    if row["failed"]:
        yield f"failed: {row['failed']} requests have no latency, and count in the duration"
    if row["p99_send_lag_ms"] is not None:
        yield (
            f"sent late by the client: p99 {row['p99_send_lag_ms']:.1f} ms, not counted in the latencies; "
            f"{row['request_throughput']:.2f} requests/s were answered"
        )
    far = {name: row[f"{name}_outliers"] for name in METRICS}
    if any(far.values()):
        yield "outliers above Q3 + 3 (Q3 - Q1) are kept: " + "; ".join(
            f"{n} {name.upper()} above {row[f'{name}_outliers_above_ms']:,.1f} ms (mean without them "
            f"{row[f'mean_{name}_without_outliers_ms']:,.2f} ms)"
            for name, n in far.items()
            if n
        )
    else:
        yield "outliers above Q3 + 3 (Q3 - Q1): none"


def show_sweep(points: Sequence[tuple[str, Row]], kind: str, no_plot: str | None) -> Iterator[RenderableType]:
    first = points[0][1]
    yield Text(
        f"{first['model_id']}: {first['num_prompts']} requests at each point, {first['inputs']} tokens in, "
        f"{first['outputs']} out, prompts as {first['prompts_are']}; each point has its own prompts and "
        f"{first['warmups']} warm-up requests, not counted; outliers are kept"
    )
    lines = [
        (
            name,
            f"{row['request_throughput']:.2f}",
            f"{row['output_throughput']:,.0f}",
            *_pairs(row),
            _good(row),
            str(row["failed"]),
        )
        for name, row in points
    ]
    heads = ("requests/s", "output tokens/s", "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "goodput/s", "failed")
    yield table("", (kind, *heads), lines)
    yield Text(_saturation(points, kind))
    if first["goodput"]:
        kept = [name for name, row in points if row["request_goodput"] >= ENOUGH * row["num_prompts"] / row["duration"]]
        most = f"{kept[-1]} {kind}" if kept else "none of the points"
        yield Text(f"{_limits(first)} for at least {ENOUGH:.0%} of the requests: up to {most}")
    for error in sorted({error for _, row in points for error in row["errors"]}):
        yield Text(f"failed: {error}", style="red")
    if no_plot is not None:
        yield Text(f"no plot: {no_plot}", style="dim")


def _saturation(points: Sequence[tuple[str, Row]], kind: str) -> str:
    for (name, a), (_, b) in pairwise(points):
        if b["output_throughput"] < GAIN * a["output_throughput"]:
            return f"throughput rises by less than {GAIN - 1:.0%} from {name} {kind} to the next point"
    return "throughput still rises at the last point"


def _limits(row: Row) -> str:
    return " and ".join(f"{name.upper()} {limit:g} ms" for name, limit in row["goodput"].items())


def _good(row: Row) -> str:
    return "–" if row["request_goodput"] is None else f"{row['request_goodput']:.2f}"


def _pairs(row: Row) -> list[str]:
    found = [(row[f"p50_{name}_ms"], row[f"p99_{name}_ms"]) for name in ("ttft", "tpot")]
    return ["–" if a is None or b is None else f"{a:,.1f} / {b:,.1f}" for a, b in found]
