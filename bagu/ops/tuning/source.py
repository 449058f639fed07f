"""The hash of the source code that a kernel's speed depends on: its backend and the modules with kernels it imports.

Comments, docstrings, layout, imports and the names of modules do not count: a module may move to another folder. A
tuning with another hash is stale and is not used.
"""

import ast
import functools
import hashlib
import importlib.util
import re
from pathlib import Path

IMPORT = re.compile(r"^ *from (bagu\.[\w.]+) import (?:\(([^)]*)\)|(.+))", re.MULTILINE)
KERNEL = re.compile(r"^@(triton|gluon)\.jit", re.MULTILINE)


@functools.cache
def source_hash(module: str) -> str:
    """The hash of a module, of the backends and of the modules with kernels that it imports."""
    digest = hashlib.sha256()
    for code in sorted(map(_code, _reached(module))):
        digest.update(code.encode())
    return digest.hexdigest()[:16]


def _reached(module: str) -> set[str]:
    found, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [m for m in _imports(name) if _path(m) is not None and _decides_speed(m)]
    return found


def _decides_speed(name: str) -> bool:
    return name.endswith(".triton_backend") or KERNEL.search(_text(name)) is not None


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
    """A syntax tree as text, without docstrings, imports, `__all__`, positions and empty fields.

    `ast.dump` would differ between versions of Python: 3.12 has new fields, which are empty here, and 3.13 leaves empty
    ones out. A store is used with other versions than the one that wrote it.
    """
    if isinstance(node, list):
        return f"[{','.join(code_text(n) for n in node if not _names_modules(n))}]"
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


def _names_modules(node: object) -> bool:
    if isinstance(node, ast.Assign):
        return isinstance(target := node.targets[0], ast.Name) and target.id == "__all__"
    return isinstance(node, ast.Import | ast.ImportFrom)
