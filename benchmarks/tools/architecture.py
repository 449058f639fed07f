"""`python -m benchmarks.tools.architecture [--check]`: draw the parts of bagu into docs/architecture.svg and .md.

The picture shows the imports that the files of bagu/ have: a part stands above every part that it imports, and an
import that follows from others is not drawn. The table of docs/architecture.md is docs/parts.toml. `--check` writes
nothing and fails if a document is out of date.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

ROOT = Path(__file__).parents[2]
PARTS: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "docs/parts.toml").read_text(encoding="utf-8"))
BEGIN, END = "<!-- parts:begin -->", "<!-- parts:end -->"
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 240, 62, 28, 46, 24  # pixels
COLOURS = ("#eef4fb", "#8fb2d9", "#4a6f9c", "#1c2733", "#54616e")  # box, its border, imports, name, sentence


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements inside a node. `ast.walk` looks into expressions too: 1.4 s for the package."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from statements(child)


def imported(part: str) -> set[str]:
    """The parts that the files of a part import, at the top of a file or inside a function."""
    found: set[str] = set()
    for file in (ROOT / "bagu" / part).rglob("*.py"):
        for node in statements(ast.parse(file.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{a.name}" for a in node.names]
            found |= {n.split(".")[1] for n in names if n.startswith("bagu.")}
    return (found & PARTS.keys()) - {part}


def floors(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """The highest floor for a part that none imports, else one below the lowest part that imports it."""

    def depth(part: str) -> int:
        return max((depth(above) + 1 for above, tos in graph.items() if part in tos), default=0)

    depths = {part: depth(part) for part in graph}
    return {part: max(depths.values()) - d for part, d in depths.items()}


def direct(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The imports that do not follow from others: a → c is left out if a → b → … → c."""

    def below(part: str) -> set[str]:
        return graph[part].union(*(below(p) for p in graph[part])) if graph[part] else set()

    return {part: {to for to in tos if not any(to in below(via) for via in tos)} for part, tos in graph.items()}


def picture(graph: Mapping[str, set[str]]) -> str:
    """The parts as an SVG, the lowest floor at the bottom."""
    level = floors(graph)
    rows = [[p for p in PARTS if level[p] == f] for f in range(max(level.values()), -1, -1)]
    across = max(map(len, rows))
    width = across * WIDTH + (across - 1) * GAP_X + 2 * MARGIN
    height = len(rows) * HEIGHT + (len(rows) - 1) * GAP_Y + 2 * MARGIN
    corner: dict[str, tuple[float, float]] = {}
    for r, row in enumerate(rows):
        row.sort(key=lambda part: _middle([corner[p][0] for p in corner if part in direct(graph)[p]]))
        left = (width - len(row) * WIDTH - (len(row) - 1) * GAP_X) / 2
        corner |= {p: (left + i * (WIDTH + GAP_X), MARGIN + r * (HEIGHT + GAP_Y)) for i, p in enumerate(row)}
    box, border, line, name, sentence = COLOURS
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        ' font-family="system-ui, sans-serif">',
        "<title>The parts of bagu and their imports</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for part, tos in sorted(direct(graph).items()):
        for to in sorted(tos):
            (x0, y0), (x1, y1) = corner[part], corner[to]
            x0, x1, y0 = x0 + WIDTH / 2, x1 + WIDTH / 2, y0 + HEIGHT
            turn, middle = y1 - GAP_Y, y1 - GAP_Y / 2  # vertical past the floors between, which have gaps there
            path = f"M{x0:g} {y0:g} V{turn:g} C{x0:g} {middle:g} {x1:g} {middle:g} {x1:g} {y1:g}"
            lines.append(f'<path d="{path}" fill="none" stroke="{line}" stroke-width="1.3" opacity="0.6"/>')
    for part, (x, y) in corner.items():
        lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="7" fill="{box}" stroke="{border}"/>'
            f'<text x="{x + 12:g}" y="{y + 22:g}" font-size="16" font-weight="600" fill="{name}">{part}</text>'
        )
        for i, words in enumerate(wrap(PARTS[part]["holds"].replace("`", ""), 34)[:2]):
            at = f'x="{x + 12:g}" y="{y + 39 + 15 * i:g}"'
            lines.append(f'<text {at} font-size="12.5" fill="{sentence}">{escape(words)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _middle(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def table(graph: Mapping[str, set[str]]) -> str:
    """docs/parts.toml as a table, the highest floor first."""
    level = floors(graph)
    lines = ["| floor | part | holds | start reading at | may import |", "|--:|---|---|---|---|"]
    for part in sorted(PARTS, key=lambda p: -level[p]):
        row = PARTS[part]
        file = row["start"].partition(" : ")[0]
        every = [p for p in PARTS if level[p] < level[part]]
        may = "every part below" if set(every) == set(row["imports"]) and len(every) > 5 else ", ".join(row["imports"])
        start = f"[`{row['start']}`](../bagu/{file})"
        lines.append(f"| {level[part]} | `{part}` | {row['holds']}: {row['more']} | {start} | {may or '–'} |")
    return "\n".join(lines)


def updated(document: str, text: str) -> str:
    """The document with this text between its marks."""
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a document is out of date")
    check = parser.parse_args().check
    graph = {part: imported(part) for part in PARTS}
    page = ROOT / "docs/architecture.md"
    new = {
        ROOT / "docs/architecture.svg": picture(graph),
        page: updated(page.read_text(encoding="utf-8"), table(graph)),
    }
    stale = [f for f, text in new.items() if not f.exists() or f.read_text(encoding="utf-8") != text]
    for file in stale:
        print(f"{file.relative_to(ROOT)} {'is out of date: run make tables' if check else 'written'}")
        if not check:
            file.write_text(new[file], encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
