"""The hash of the source code that a kernel's speed depends on: its backend and every module of bagu.ops it imports.

Comments, docstrings and line numbers do not count. A tuning with another hash is stale and is not used.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from pathlib import Path

__all__ = ["source_hash"]


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


def _path(name: str) -> Path | None:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a name imported from a module, not a module
        return None
    return Path(found.origin) if found is not None and found.origin else None


@functools.cache
def _tree(name: str) -> ast.Module:
    path = _path(name)
    assert path is not None
    return ast.parse(path.read_text())


def _imports(name: str) -> list[str]:
    nodes = [n for n in ast.walk(_tree(name)) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("bagu.")]
    return [m for n in nodes for m in (str(n.module), *(f"{n.module}.{a.name}" for a in n.names))]


def _code(name: str) -> str:
    """The syntax tree without docstrings and positions."""
    tree = _tree(name)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            node.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.dump(tree)
