"""The tables of docs/quantization.md: errors and speeds from the recorded results of two labs.

`bagu lab run quantization_error int8_matmul --out benchmarks/results/labs` keeps a result.json of each.
Errors are those of the latest record, because they do not depend on the machine; speeds are shown for every machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tools.markdown import markdown_table

Row = Mapping[str, Any]
Result = Mapping[str, Any]  # a lab's result.json
LABS = ("quantization_error", "int8_matmul")
SHARING = ("tensor", "row", "group")
METHODS = ("plain", "smooth", "rotate")
NOTHING = "No result is recorded yet."


def render(results: Mapping[str, Sequence[Result]]) -> str:
    """The tables of the recorded results, by lab."""
    weights, products = (results.get(lab, ()) for lab in LABS)
    parts = []
    if weights:
        last = _latest(weights)
        parts += [
            "Error of a layer's output in %, mean (least–most) over five seeds or layers, by the values that share a "
            f"scale. `bagu lab run quantization_error`{_origin(last)}.",
            _errors(last["rows"]),
        ]
    if products:
        last = _latest(products)
        parts += [
            "Error of an int8 product in %, mean (least–most) over five seeds and the predicted value, by the share of "
            f"channels of x that are 50 times as large as the others. `bagu lab run int8_matmul`{_origin(last)}.",
            _outliers(last["rows"]),
            "Speed of square products against the float product of the same sizes, with 95 % intervals, from the same "
            "lab.",
            _speeds(products),
        ]
    return "\n\n".join(parts) or NOTHING


def _latest(results: Sequence[Result]) -> Result:
    return max(results, key=lambda r: str(r["environment"]["time"]))


def _origin(result: Result) -> str:
    return f" on {result['machine']}, {str(result['environment']['time'])[:10]}"


def _errors(rows: Sequence[Row]) -> str:
    by_key: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        by_key.setdefault((row["weights"], row["format"], row["scale_per"]), []).append(row)
    lines = []
    for weights, form in dict.fromkeys(key[:2] for key in by_key):
        found = [by_key[weights, form, sharing] for sharing in SHARING]
        cells = [_spread([r["output_error_percent"] for r in own]) for own in found]
        guess = " / ".join(f"{own[0]['predicted_error_percent']:.2f}" for own in found)
        lines.append((weights, form, *cells, guess if weights == "Gaussian" else "–"))
    return markdown_table(("weights", "format", "per tensor", "per row", "per 128 values", "predicted"), lines, names=2)


def _outliers(rows: Sequence[Row]) -> str:
    by_key: dict[tuple[float, str], list[Row]] = {}
    for row in rows:
        if row["part"] == "error":
            by_key.setdefault((row["outlier_percent"], row["method"]), []).append(row)
    lines = []
    for share in sorted({share for share, _ in by_key}):
        found = [by_key[share, method] for method in METHODS]
        cells = [
            f"{_spread([r['error_percent'] for r in own])}, {own[0]['predicted_error_percent']:.2f}" for own in found
        ]
        lines.append((f"{round(share, 1):g} %", *cells))
    return markdown_table(("outlier channels", *METHODS), lines, names=1)


def _speeds(results: Sequence[Result]) -> str:
    lines = []
    for result in sorted(results, key=lambda r: str(r["machine"])):
        for row in result["rows"]:
            if row["part"] == "speed":
                ratio = f"{row['speedup']:.2f}× ({row['speedup_low']:.2f}–{row['speedup_high']:.2f})"
                rate = f"{row['rate_top_per_s']:,.2f}"
                size = f"{row['size']}³"
                lines.append((str(result["machine"]), row["method"], size, f"{row['time_us']:,.0f}", rate, ratio))
    return markdown_table(("machine", "product", "size", "µs", "TOP/s", "speed"), lines, names=2)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.2f} ({min(values):.2f}–{max(values):.2f})"
