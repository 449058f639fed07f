"""The table of docs/tuning.md: what the search found on the machines whose store ships with the package."""

from __future__ import annotations

from collections.abc import Sequence

from bagu.bench.tune_report import HEADS, sentences, steps_lines
from bagu.bench.tune_searches import searches
from bagu.ops.tuning.store import Record
from benchmarks.tools.markdown import markdown_table

NOTHING = "No store ships with the package yet."


def render(records: Sequence[Record]) -> str:
    """A caption, a table and the totals for each device."""
    found = searches(records)
    parts = []
    for device in sorted({s.winner.kind.device for s in found}):
        own = [s for s in found if s.winner.kind.device == device]
        env = own[-1].winner.environment
        parts += [
            f"Measured on **{device}** in bf16 (torch {env.get('torch')}, Triton {env.get('triton')}, driver "
            f"{env.get('driver')}) by `bagu tune ops`. A line is a step of an op, over its benchmark cases.",
            markdown_table(HEADS, [(f"`{op}`", *rest) for op, *rest in steps_lines(own)], names=2),
            "\n".join(f"- {line}" for line in sentences(own)),
        ]
    return "\n\n".join(parts) or NOTHING
