"""The hash of the source code that a kernel's speed depends on: its backend and every module of bagu.ops it imports.

Comments, docstrings, layout and line numbers do not count. A tuning with another hash is stale and is not used.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
from pathlib import Path

__all__ = ["code_text", "source_hash"]

IMPORT = re.compile(r"^ *from (bagu\.[\w.]+) import (?:\(([^)]*)\)|(.+))", re.MULTILINE)


@functools.cache
def source_hash(module: str) -> str:
    """The hash of a module and of what it imports from bagu.ops.kernels and the folders of ops."""
    digest = hashlib.sha256()
    for name in sorted(_reached(module)):
        digest.update(_code(name).encode())
    return digest.hexdigest()[:16]


def _reached(module: str) -> set[str]:
    found, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name not in found and _path(name) is not None:
            found.add(name)
            todo += [m for m in _imports(name) if "kernel" in m or m.endswith("triton_backend")]
    return found


@functools.cache
def _path(name: str) -> Path | None:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a name imported from a module, not a module
        return None
    return Path(found.origin) if found is not None and found.origin else None


@functools.cache
def _text(name: str) -> str:
    path = _path(name)
    assert path is not None
    return path.read_text(encoding="utf-8")


@functools.cache
def _imports(name: str) -> list[str]:
    found = [(module, several or single) for module, several, single in IMPORT.findall(_text(name))]
    return [m for module, names in found for m in (module, *(f"{module}.{n}" for n in re.findall(r"\w+", names)))]


@functools.cache
def _code(name: str) -> str:
    return code_text(ast.parse(_text(name)))


def code_text(node: object) -> str:
    """A syntax tree as text, without docstrings, positions and empty fields.

    `ast.dump` would differ between versions of Python: 3.12 has new fields, which are empty here, and 3.13 leaves empty
    ones out. A store is used with other versions than the one that wrote it.
    """
    if isinstance(node, list):
        return f"[{','.join(map(code_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    shown = []
    for name in node._fields:
        value = getattr(node, name, None)
        if name == "body" and isinstance(value, list) and value and _is_docstring(value[0]):
            value = value[1:]
        if value is not None and value != []:
            shown.append(f"{name}={code_text(value)}")
    return f"{type(node).__name__}({','.join(shown)})"


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
