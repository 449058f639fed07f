"""The table of docs/parallel/data_parallel.md, from the rows of `bagu bench parallel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tools.markdown import commit_words, markdown_table

Row = Mapping[str, Any]
HEAD = ("machine", "shape", "ranks", "independent, tokens/s", "data parallel, tokens/s", "ratio", "rounds")


def render(rows: Sequence[Row]) -> str:
    """The latest row of each machine, shape and number of ranks. The folder also has rows of servers and shares."""
    rows = [row for row in rows if row["system"] == "parallel"]
    if not rows:
        return "Nothing is recorded yet: `bagu bench parallel` writes it to `benchmarks/results/parallel`."
    latest: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        key = (row["env"]["machine"], row["shape"], -row["ranks"])
        if key not in latest or row["env"]["time"] >= latest[key]["env"]["time"]:
            latest[key] = row
    lines = [
        (
            machine, f"`{shape}`, {row['tokens']:,} tokens a step", str(row["ranks"]),
            f"{row['alone_tokens_per_s']:,.0f}", f"{row['mesh_tokens_per_s']:,.0f}",
            f"**{row['ratio']:.3f}** ({row['low_ratio']:.3f} to {row['high_ratio']:.3f})", str(row["rounds"]),
        )
        for (machine, shape, _), row in sorted(latest.items(), key=lambda item: item[0])
    ]  # fmt: skip
    commits = commit_words(row["env"]["commit"] for row in latest.values())
    return f"At commit {commits}. Reproduce with `bagu bench parallel`.\n\n{markdown_table(HEAD, lines, names=2)}"
