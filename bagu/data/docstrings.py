"""Pairs of a docstring's first sentence and the function's code, from folders of Python files: quick, since an embedder
needs many. `bagu.data.stdlib` has the exact ones, for tasks that are graded."""

import ast
import os
import re
import site
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from bagu.data.pairs import Pair

SKIPPED = {"__pycache__", "test", "tests", "testing", "_vendor", "_distutils"}  # the last two copy other packages
MAX_BYTES = 200_000  # of a file; larger ones are mostly generated
MAX_CODE = 8_000  # characters


def first_sentence(docstring: str) -> str:
    return re.split(r"(?<=[.!?])\s|\n\n", docstring)[0]


def installed_folders() -> list[Path]:
    """The folders of installed packages that this Python imports from."""
    names = [sysconfig.get_paths()["purelib"], *site.getsitepackages()]
    import numpy  # an environment over another one has the packages of both

    folders = [*map(Path, names), Path(numpy.__file__).parent.parent]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def docstring_pairs(folders: Iterable[Path]) -> Iterator[Pair]:
    """Of every function with a docstring and a body, in the order of the paths."""
    for root in folders:
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED)
            for name in sorted(name for name in names if name.endswith(".py")):
                yield from _pairs_of(Path(folder, name))


def _pairs_of(path: Path) -> Iterator[Pair]:
    try:
        if path.stat().st_size > MAX_BYTES:
            return
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            tree = ast.parse(text) if '"""' in text else None
    except (OSError, ValueError, SyntaxError, RecursionError):  # not Python of this version: there are others
        return
    lines = text.split("\n")
    for node in _functions(tree):
        docstring = (ast.get_docstring(node) or "").strip()
        if not docstring or len(node.body) < 2:
            continue
        first = node.body[0]
        kept = lines[node.lineno - 1 : first.lineno - 1] + lines[first.end_lineno : node.end_lineno]
        code = textwrap.dedent("\n".join(kept))
        if len(code) <= MAX_CODE:
            yield Pair(f"{path}:{node.lineno}", first_sentence(docstring), code)


def _functions(node: ast.AST | None) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for inner in getattr(node, "body", ()):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.If | ast.Try):
            yield from _functions(inner)
