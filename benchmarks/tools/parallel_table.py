"""The table of docs/parallel/data_parallel.md, from the rows of `bagu bench parallel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
HEAD = ("machine", "shape", "ranks", "independent, tokens/s", "data parallel, tokens/s", "ratio", "rounds")


def render(rows: Sequence[Row]) -> str:
    """The latest row of each machine, shape and number of ranks."""
    if not rows:
        return "Nothing is recorded yet: `bagu bench parallel` writes it to `benchmarks/results/parallel`."
    latest: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        key = (row["env"]["machine"], row["shape"], -row["ranks"])
        if key not in latest or row["env"]["time"] >= latest[key]["env"]["time"]:
            latest[key] = row
    commits = ", ".join(sorted({f"`{str(row['env']['commit'])[:9]}`" for row in latest.values()}))
    lines = [_line(HEAD), _line(["---"] * 2 + ["--:"] * (len(HEAD) - 2))]
    for machine, shape, ranks in sorted(latest):
        row = latest[machine, shape, ranks]
        lines.append(
            _line(
                [
                    machine, f"`{shape}`, {row['tokens']:,} tokens a step", str(row["ranks"]),
                    f"{row['alone_tokens_per_s']:,.0f}", f"{row['mesh_tokens_per_s']:,.0f}",
                    f"**{row['ratio']:.3f}** ({row['low_ratio']:.3f} to {row['high_ratio']:.3f})", str(row["rounds"]),
                ]
            )
        )  # fmt: skip
    return f"At commit {commits}. Reproduce with `bagu bench parallel`.\n\n" + "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
