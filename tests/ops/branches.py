"""Which branches the launchers have, and which of them a run takes.

A branch is an `if`, a conditional expression, an operand of `and` or `or`, each true or false; or a `min` or `max`, by
the argument that it gives. Launchers are the host code of the Triton backends. Each is rewritten so that it records its
branches: `if N > LIMIT:` becomes `if branch(17, N > LIMIT):`. Kernels do not run, so this takes seconds.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import OpSpec
from tests.ops import sources

__all__ = ["arms", "branch", "chosen", "instrumented", "kernels_switched_off", "taken"]

taken: set[tuple[int, int]] = set()  # (branch, arm), filled while instrumented code runs
arms: dict[tuple[int, int], str] = {}  # every arm that there is -> what it is called in a message
_numbers = iter(range(1_000_000))


def branch(number: int, value: Any) -> Any:
    taken.add((number, int(bool(value))))
    return value


def chosen(number: int, pick: Callable[..., Any], *values: Any) -> Any:
    value = pick(*values)
    taken.update((number, i) for i, v in enumerate(values) if v == value)
    return value


# What these are set to changes how fast a kernel is, and not what it computes.
SCHEDULING = {"num_warps", "warps", "most_warps", "maxnreg", "num_stages", "STAGES", "each", "ahead"}


class _Recorder(ast.NodeTransformer):
    def __init__(self, where: str) -> None:
        self.where = where

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return node if node.arg in SCHEDULING else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        names = {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        return node if names <= SCHEDULING else self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        for i, key in enumerate(node.keys):
            if not (isinstance(key, ast.Constant) and key.value in SCHEDULING):
                node.values[i] = self.visit(node.values[i])
        return node

    def _test(self, node: ast.expr) -> ast.expr:
        number, text = next(_numbers), ast.unparse(node)
        arms[number, 1], arms[number, 0] = f"{self.where}: {text}", f"{self.where}: not ({text})"
        return _call("branch", number, self.visit(node))

    def visit_If(self, node: ast.If) -> ast.AST:
        refuses = isinstance(node.body[0], ast.Raise)
        test = self.visit(node.test) if refuses else self._test(node.test)
        body = [self.visit(s) for s in node.body]
        return ast.If(test=test, body=body, orelse=[self.visit(s) for s in node.orelse])

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return ast.IfExp(test=self._test(node.test), body=self.visit(node.body), orelse=self.visit(node.orelse))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        *firsts, last = node.values
        return ast.BoolOp(op=node.op, values=[*(self._test(v) for v in firsts), self.visit(last)])

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not (isinstance(node.func, ast.Name) and node.func.id in ("min", "max") and len(node.args) > 1):
            return self.generic_visit(node)
        number = next(_numbers)
        for i, value in enumerate(node.args):
            arms[number, i] = f"{self.where}: {ast.unparse(node)} gives {ast.unparse(value)}"
        return _call("chosen", number, node.func, *(self.visit(a) for a in node.args))


def _call(function: str, number: int, *values: ast.expr) -> ast.expr:
    return ast.Call(func=ast.Name(function, ast.Load()), args=[ast.Constant(number), *values], keywords=[])


def instrumented(module: str) -> str:
    """The source of a module whose launchers record their branches."""
    changed = copy.deepcopy(sources.tree(module))
    reached = {node.name for node in sources.functions(module, "triton") if not sources.is_kernel(node)}
    for i, node in enumerate(changed.body):
        if isinstance(node, sources.Function) and node.name in reached:
            changed.body[i] = _Recorder(f"{module.removeprefix('bagu.ops.')}.{node.name}").visit(node)
    future = [i for i, n in enumerate(changed.body) if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    at = future[0] + 1 if future else 1  # the docstring is first
    changed.body[at:at] = ast.parse("from tests.ops.branches import branch, chosen").body
    return ast.unparse(ast.fix_missing_locations(changed))


@contextmanager
def kernels_switched_off() -> Iterator[None]:
    """Inside, launching an interpreted kernel does nothing."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run
    InterpretedFunction.run = lambda *args, **kwargs: None
    try:
        yield
    finally:
        InterpretedFunction.run = run


def triton_specs() -> list[OpSpec]:
    return [s for s in SPECS.values() if "triton" in s.backends]
