"""HTML fragments: values, tables and lists of facts. All text is escaped."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def text(words: str) -> str:
    """Escape `words` for HTML or SVG: control characters become visible symbols (␀), and the result is valid UTF-8."""
    plain = words.replace("\r\n", "\n").encode("utf-8", "replace").decode("utf-8")
    return escape("".join(chr(0x2400 + ord(c)) if ord(c) < 0x20 and c not in "\t\n" else c for c in plain))


def text_of(value: Any) -> str:
    """Format a value: four significant digits, a separator for thousands, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def grid(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table that scrolls if it is too wide; columns of numbers get their own class."""
    numeric = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(columns))]
    side = [' class="number"' if n else "" for n in numeric]
    head = "".join(f"<th{s}>{text(c)}</th>" for c, s in zip(columns, side, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{s}>{text(text_of(cell))}</td>" for cell, s in zip(row, side, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(pairs: Iterable[tuple[str, Any]]) -> str:
    """A list of names and values."""
    inner = "".join(f"<dt>{text(name)}</dt><dd>{text(text_of(value))}</dd>" for name, value in pairs)
    return f'<dl class="facts">{inner}</dl>'
