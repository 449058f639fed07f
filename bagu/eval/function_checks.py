"""Checks of an answer to "write the Python function NAME". They read the code with `ast` and run nothing.

    parses       Python with at least one statement
    defines      a function NAME at the top level
    statements   its body has two different statements or more; `pass`, `...`, constants and bare names do not count
    arguments    it takes an argument, unless the asked function has none, and its body reads each one (`self` and
                 `cls` only if there is no other)
    computes     it returns, stores, calls or raises something that is more than a name or a constant

Each check presumes the ones before it, so an answer has passed the first n of them. `def f(): pass` passes two.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from bagu.data.stdlib import argument_names, parsed
from bagu.eval.grades import first_code

__all__ = ["CHECKS", "checks_passed", "defined_function"]

CHECKS = ("parses", "defines", "statements", "arguments", "computes")
PLAIN = (ast.Name, ast.Constant, ast.Starred, ast.Tuple, ast.List, ast.Dict, ast.Set)  # build values, compute none

Function = ast.FunctionDef | ast.AsyncFunctionDef


def checks_passed(text: str, facts: Mapping[str, Any]) -> int:
    """How many of CHECKS the answer passes. `facts` has the asked `name` and `args` (optional: the names of the real
    function's arguments)."""
    tree = parsed(first_code(text))
    if tree is None or not tree.body:
        return 0
    function = defined_function(tree, facts["name"])
    if function is None:
        return 1
    try:
        if len({ast.dump(s) for s in _statements(function) if not _idle(s)}) < 2:
            return 2
    except RecursionError:  # a nesting so deep that no person wrote it
        return 2
    if not _reads_arguments(function, required=bool(facts.get("args", True))):
        return 3
    return 5 if _computes(function) else 4


def defined_function(tree: ast.Module, name: str) -> Function | None:
    """The last top-level function of this name, which is the one that an import of the module would find."""
    found = [node for node in tree.body if isinstance(node, Function) and node.name == name]
    return found[-1] if found else None


def _statements(function: Function) -> list[ast.stmt]:
    """The statements of the body and inside them, without those of nested functions and classes."""
    found: list[ast.stmt] = []
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.stmt):
            found.append(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            todo += [n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.expr)]
    return found


def _idle(statement: ast.stmt) -> bool:
    """Whether a statement has no effect."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant | ast.Name)
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
        return all(isinstance(t, ast.Name) and t.id == statement.value.id for t in statement.targets)
    return isinstance(statement, ast.Pass)


def _reads_arguments(function: Function, *, required: bool) -> bool:
    names = argument_names(function.args)
    own = {name for name in names if name not in ("self", "cls")} or set(names)
    read = {n.id for s in function.body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return own <= read and bool(own or not required)


def _computes(function: Function) -> bool:
    expressions = (n for s in function.body for n in ast.walk(s) if isinstance(n, ast.expr))
    return any(not isinstance(n, PLAIN) for n in expressions)
