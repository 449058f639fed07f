"""No six statement lines of a function stand twice in the package (docs/decisions/022-what-may-repeat.md)."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import bagu

ROOT = Path(bagu.__file__).parent
LINES = 6


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods; one that is inside another is part of it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
        else:
            yield from functions(child)


def statements(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The body without docstring and imports, one line per statement, however it is formatted."""
    first = 1 if ast.get_docstring(function, clean=False) is not None else 0
    body = [node for node in function.body[first:] if not isinstance(node, (ast.Import, ast.ImportFrom))]
    return [line.strip() for node in body for line in ast.unparse(node).split("\n")]


def repeated(sources: dict[str, str]) -> list[str]:
    """`file:line function` of the functions that share LINES statements in a row."""
    places: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for name, source in sources.items():
        for function in functions(ast.parse(source)):
            lines = statements(function)
            for i in range(len(lines) - LINES + 1):
                places[tuple(lines[i : i + LINES])].add(f"{name}:{function.lineno} {function.name}")
    return sorted({" ~ ".join(sorted(found)) for found in places.values() if len(found) > 1})


def test_no_statements_stand_twice() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
    assert repeated(sources) == [], "call one function from both places"


def test_a_repeated_block_is_seen_in_another_format() -> None:
    wide = "def two(x):\n" + "".join(f"    x = f(x,\n          {i})\n" for i in range(LINES))
    flat = "def one(x):\n    'Says.'\n" + "".join(f"    x = f(x, {i})\n" for i in range(LINES))
    assert repeated({"a.py": flat, "b.py": "class C:\n" + indent(wide, "    ")}) == ["a.py:1 one ~ b.py:2 two"]
    assert repeated({"a.py": "def outer():\n" + indent(flat, "    "), "b.py": flat.replace("5", "6")}) == []
