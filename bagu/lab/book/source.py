"""The source of a function of bagu as HTML, read without importing it."""

import ast
import io
import keyword
import tokenize
from functools import cache
from html import escape
from pathlib import Path
from typing import NamedTuple

from bagu.errors import BaguError

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "benchmarks/results/labs"  # in a checkout; an installed package has no records
LONGEST = 70  # lines; the rest is cut


class Code(NamedTuple):
    """A function or class: `bagu/nn/ffn.py`, its name, its first line, its source as HTML."""

    file: str
    name: str
    line: int
    html: str


@cache
def _tree(file: str) -> tuple[str, ast.Module]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return text, ast.parse(text)


@cache
def code(place: str) -> Code:
    """The source at `bagu/nn/ffn.py:Class.method`."""
    file, _, name = place.partition(":")
    if not (ROOT / file).exists():
        raise BaguError(f"{place} is named by the book, but there is no {file}", hint="mend bagu/lab/book/words")
    text, tree = _tree(file)
    node: ast.AST = tree
    for part in name.split("."):
        inner = [n for n in getattr(node, "body", ()) if getattr(n, "name", None) == part]
        if not inner:
            raise BaguError(f"{place} is named by the book, but {file} has no {name}", hint="mend bagu/lab/book/words")
        node = inner[-1]
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])  # type: ignore[attr-defined]
    lines = text.splitlines()[first - 1 : node.end_lineno]  # type: ignore[attr-defined]
    indent = len(lines[0]) - len(lines[0].lstrip())
    kept = [line[indent:] if not line[:indent].strip() else line for line in lines[:LONGEST]]
    cut = [f"… {len(lines) - LONGEST} more lines"] if len(lines) > LONGEST else []
    return Code(file, name, first, "\n".join([highlight("\n".join(kept)), *cut]))


def highlight(source: str) -> str:
    """Keywords, strings, numbers and comments in spans. What cannot be read as Python is only escaped."""
    lines, out, at = source.splitlines(keepends=True), [], (1, 0)

    def between(start: tuple[int, int], end: tuple[int, int]) -> str:
        if start[0] == end[0]:
            return lines[start[0] - 1][start[1] : end[1]] if start[0] <= len(lines) else ""
        middle = "".join(lines[start[0] : end[0] - 1])
        return lines[start[0] - 1][start[1] :] + middle + (lines[end[0] - 1][: end[1]] if end[0] <= len(lines) else "")

    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            kind = {tokenize.STRING: "s", tokenize.COMMENT: "c", tokenize.NUMBER: "n"}.get(token.type, "")
            kind = "k" if token.type == tokenize.NAME and keyword.iskeyword(token.string) else kind
            out.append(escape(between(at, token.start)))
            text = escape(between(token.start, token.end))
            out.append(f'<span class="{kind}">{text}</span>' if kind else text)
            at = token.end
    except (tokenize.TokenError, IndentationError):  # a function that was cut
        out.append(escape(between(at, (len(lines) + 1, 0))))
    return "".join(out).rstrip("\n")
