"""The verbs of `bagu process` as functions that yield lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bagu.errors import ArgumentError, UnknownName
from bagu.process.guess import guess
from bagu.process.health import examine
from bagu.process.schema import Schema, read_schema, write_schema
from bagu.process.table import Table, read_csv
from bagu.process.words import Lang, say

MARKS = {"error": "✗", "warning": "!", "note": "·"}


def look_lines(data: Path, targets: Sequence[str], lang: str, *, write: bool) -> Iterator[str]:
    table = read_csv(data)
    path = data.with_suffix(".toml")
    known = path.exists() and not targets
    schema = read_schema(path) if known else guess(table, parse_targets(targets))
    yield f"{data}: {table.rows:,} rows, {len(table.columns)} columns"
    yield from role_lines(schema)
    yield ""
    yield from finding_lines(table, schema, language(lang))
    if write and not known and not path.exists():
        write_schema(schema, path)
        yield f"\nroles: {path} (edit it, then `bagu process fit {data}`)"
    elif path.exists():
        yield f"\nroles: {path} is kept as it is"


def role_lines(schema: Schema) -> Iterator[str]:
    width = min(28, max((len(f.name) for f in schema.columns), default=4))
    for f in schema.columns[:60]:
        words = [f.role + (f":{f.goal}" if f.goal != "none" else ""), f.unit]
        if f.low is not None and f.high is not None:
            words.append(f"{f.low:.5g} to {f.high:.5g}" + (f", step {f.step:g}" if f.step else ""))
        words += [f"{len(f.levels)} levels: {', '.join(f.levels[:4])}"] if f.levels else []
        yield f"  {f.name:{width}}  " + "  ".join(w for w in words if w)
    if len(schema.columns) > 60:
        yield f"  … and {len(schema.columns) - 60} more columns"


def finding_lines(table: Table, schema: Schema, lang: Lang) -> Iterator[str]:
    found = examine(table, schema)
    for finding in found[:40]:
        yield f"{MARKS[finding.level]} {finding.words(lang)}"
    if len(found) > 40:
        yield f"… and {len(found) - 40} more findings"
    if not found:
        yield say("healthy", {}, lang)


def parse_targets(texts: Iterable[str]) -> dict[str, str] | None:
    """`yield:max` and the like; a name alone is a target without a goal, for limits."""
    found = {}
    for text in texts:
        name, _, goal = text.rpartition(":") if text.endswith((":max", ":min")) else (text, "", "none")
        if not name:
            raise ArgumentError(f"--target {text!r} has no name", hint="give NAME:max or NAME:min")
        found[name] = goal
    return found or None


def language(name: str) -> Lang:
    UnknownName.check("language", name, ("en", "zh"))
    return "zh" if name == "zh" else "en"
