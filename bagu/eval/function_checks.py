"""Checks of an answer to "write the Python function NAME". They read the code with `ast` and run nothing.

    function     Python that defines a function at the top level
    name         one of them has the asked name
    statements   its body has two different statements or more; `pass`, `...`, constants and bare names do not count
    arguments    it takes an argument, unless the asked function has none, and its body reads each one (`self` and
                 `cls` only if there is no other)
    computes     it returns, stores, calls or raises something that is more than a name or a constant

`checks_passed` counts in order: each check presumes the ones before it, and `def f(): pass` passes two. `check_parts`
has each result by itself, for a reward.
"""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from bagu.data.stdlib import argument_names, parsed
from bagu.eval.grades import first_code

CHECKS = ("function", "name", "statements", "arguments", "computes")
PLAIN = (ast.Name, ast.Constant, ast.Starred, ast.Tuple, ast.List, ast.Dict, ast.Set)  # build values, compute none

Function = ast.FunctionDef | ast.AsyncFunctionDef


def checks_passed(text: str, facts: Mapping[str, Any]) -> int:
    """How many of CHECKS the answer passes, in order. `facts` has the asked `name` and `args` (optional: the names of
    the real function's arguments)."""
    parts = check_parts(text, facts)
    return next((number for number, name in enumerate(CHECKS) if parts[name] < 1), len(CHECKS))


def check_parts(text: str, facts: Mapping[str, Any]) -> dict[str, float]:
    """The result of each check, 1 or 0; another name has a share (`name_share`). The checks of the body are those of
    the function with the asked name, or of the last one; the last two presume two statements."""
    functions = defined_functions(text)
    if not functions:
        return dict.fromkeys(CHECKS, 0.0)
    named = next((f for f in reversed(functions) if f.name == facts["name"]), None)  # what an import would find
    function = functions[-1] if named is None else named
    try:
        several = len({ast.dump(s) for s in _statements(function) if not _idle(s)}) >= 2
    except RecursionError:  # a nesting so deep that no person wrote it
        several = False
    reads = several and _reads_arguments(function, required=bool(facts.get("args", True)))
    results = 1.0, _name_share(functions, facts["name"]), several, reads, several and _computes(function)
    return dict(zip(CHECKS, map(float, results), strict=True))


def defined_functions(text: str) -> list[Function]:
    """The top-level functions of an answer; empty if it does not parse."""
    tree = parsed(first_code(text))
    return [] if tree is None else [node for node in tree.body if isinstance(node, Function)]


def name_share(text: str, name: str) -> float:
    """How much of the asked name the answer's functions have: 1 for the name itself, else the longest common beginning
    as a share of the longer name. A reward that pays for it shows the way to a name of several tokens."""
    return _name_share(defined_functions(text), name)


def _name_share(functions: Sequence[Function], name: str) -> float:
    return max((_common(f.name, name) / max(len(f.name), len(name)) for f in functions), default=0.0)


def _common(a: str, b: str) -> int:
    """Characters of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


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
