"""The source of a backend: which functions a call can reach, in its own module and through imports all the way."""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import OpSpec

# What every op shares on the way to a backend or to a launch. It is no backend's, and has tests of its own.
OUTSIDE = {
    f"bagu.ops.{name}"
    for name in (
        "contract.core", "contract.signature", "contract.layouts", "call.eager", "call.dispatch", "call.custom",
        "invariant.mode", "replay.launcher", "replay.plan", "replay.record", "replay.replay",
    )
}  # fmt: skip

Function = ast.FunctionDef | ast.ClassDef
Names = dict[str, set[str]]  # module -> names of its top level


def backend_module(spec: OpSpec, backend: str) -> str:
    return f"bagu.ops.{spec.name}.{backend}_backend"


@cache
def path_of(module: str) -> Path | None:
    """The file of a module of bagu.ops, or None where there is no such module."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(found.origin) if found is not None and found.origin is not None else None


def source(module: str) -> str:
    path = path_of(module)
    assert path is not None, module
    return path.read_text()


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(source(module))


def is_kernel(node: Function) -> bool:
    return any("jit" in ast.unparse(d) for d in node.decorator_list)


@cache
def reached(spec_name: str, backend: str) -> Names:
    """The names that a call of a backend's two functions can lead to."""
    module = backend_module(SPECS[spec_name], backend)
    found: Names = defaultdict(set)
    for where, name in closure(module, "forward") | closure(module, "backward"):
        found[where].add(name)
    return dict(found)


@cache
def closure(module: str, name: str) -> frozenset[tuple[str, str]]:
    """(module, name) of a definition and of all that it can lead to."""
    found: set[tuple[str, str]] = set()
    new = {(module, name)}
    while new:
        found |= new
        new = {use for at in new for use in _uses(*at)} - found
    return frozenset(found)


@cache
def users(module: str, name: str, backend: str) -> tuple[str, ...]:
    """The ops whose `backend` can reach this function."""
    return tuple(
        s.name for s in SPECS.values() if backend in s.backends and name in reached(s.name, backend).get(module, ())
    )


def functions(module: str, backend: str) -> Iterator[Function]:
    """The top-level functions and classes of a module that some op's `backend` can reach."""
    for node in tree(module).body:
        if isinstance(node, Function) and users(module, node.name, backend):
            yield node


def modules(backend: str) -> list[str]:
    """All modules that backends of this name consist of."""
    found = {m for s in SPECS.values() if backend in s.backends for m in reached(s.name, backend)}
    return sorted(m for m in found if any(True for _ in functions(m, backend)))


@cache
def _uses(module: str, name: str) -> frozenset[tuple[str, str]]:
    """(module, name) of whatever the definition of a name mentions."""
    imported, inside = _imports(module), _definitions(module)
    found = set()
    for node in inside.get(name, ()):
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                where, what = imported.get(part.id, (module if part.id in inside else "", part.id))
                if where and what:
                    found.add((where, what))
            elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                where, what = imported.get(part.value.id, ("", ""))
                if where and not what:  # an attribute of an imported module
                    found.add((where, part.attr))
    return frozenset(found)


@cache
def _definitions(module: str) -> dict[str, list[ast.stmt]]:
    found: defaultdict[str, list[ast.stmt]] = defaultdict(list)
    for node in tree(module).body:
        if isinstance(node, Function):
            found[node.name].append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        found[part.id].append(node)
    return dict(found)


@cache
def _imports(module: str) -> dict[str, tuple[str, str]]:
    """The names that a module imports from bagu.ops -> (module, name there), the name empty for a module."""
    found = {}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bagu.ops"):
            for alias in (n for n in node.names if n.name != "SPEC"):  # the definition is no part of a backend
                submodule = f"{node.module}.{alias.name}"
                where, what = (submodule, "") if path_of(submodule) else (str(node.module), alias.name)
                if where not in OUTSIDE:
                    found[alias.asname or alias.name] = where, what
    return found


def imports(module: str) -> set[str]:
    """The modules of bagu.ops that a module imports from."""
    return {where for where, _ in _imports(module).values()}
