"""Bugs that are planted in sources: the edits of an expression, shared by `bagu drill bug` and by the tests of ops.

In kernels:
    zero        a store writes zeros: a lost output, a zero gradient
    short       a bound `a < N` becomes `a < N - 1`: a lost last row or column
    max         a sum becomes a maximum
    one trip    a loop over rows, blocks or programs ends after its first trip
    stride      the stride of another tensor is used
In launchers:
    packed      the stride of a tensor becomes what it would be without gaps
    swapped     the stride of a tensor becomes that of its neighbour
In kernels and in formulas:
    no eps      `… + eps` loses the eps
    no select   `where(c, a, b)` becomes a: a mask that masks nothing
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import accumulate


def calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def in_kernel(node: ast.AST, function: ast.AST) -> Iterator[tuple[str, str]]:
    """(kind, what the node becomes) of each bug that can be planted at this node of a kernel."""
    text = ast.unparse(node) if isinstance(node, ast.expr) else ""
    if calls(node, "tl.store"):
        assert isinstance(node, ast.Call)
        where, value, *rest = map(ast.unparse, node.args)
        yield "zero", f"tl.store({', '.join([where, f'({value}) * 0', *rest])})"
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt):
        yield "short", f"({ast.unparse(node.left)}) < ({ast.unparse(node.comparators[0])}) - 1"
    if calls(node, "tl.sum"):
        yield "max", text.replace("tl.sum", "tl.max", 1)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("range", "tl.range"):
        parts = [ast.unparse(a) for a in node.args]
        first, end, step = parts if len(parts) == 3 else [*parts, "1"] if len(parts) == 2 else ["0", *parts, "1"]
        yield "one trip", f"range({first}, min({end}, {first} + {step}), {step})"
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id.endswith("stride"):
        assert isinstance(function, ast.FunctionDef)
        strides = [a.arg for a in function.args.args if a.arg.endswith("stride")]
        if node.id in strides and len(strides) > 1:
            yield "stride", strides[strides.index(node.id) - 1]


def in_formula(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The same for a node of a kernel or of a torch backend."""
    if (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and ast.unparse(node.right).rpartition(".")[2] == "eps"
    ):
        yield "no eps", f"({ast.unparse(node.left)}) + 0.0"
    if (calls(node, "tl.where") or calls(node, "torch.where")) and isinstance(node, ast.Call):
        called, (test, value, _) = ast.unparse(node.func), map(ast.unparse, node.args)
        yield "no select", f"{called}({test}, {value}, {value})"


def in_launcher(node: ast.AST, function: ast.AST) -> Iterator[tuple[str, str]]:
    """The same for a node of the host's part of a Triton backend."""
    if calls_stride(node) and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        tensor, dim = ast.unparse(node.func.value), ast.unparse(node.args[0])
        yield "packed", f"{tensor}.contiguous().stride({dim})"
        tensors = [ast.unparse(n.func.value) for n in ast.walk(function) if calls_stride(n)]  # type: ignore[attr-defined]
        if others := [t for t in dict.fromkeys(tensors) if t != tensor]:
            yield "swapped", f"{others[0]}.stride({dim})"


def calls_stride(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "stride"
        and bool(node.args)
    )


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """(kind, source with one bug) of each place of a file where one can be planted."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]
    for function in ast.parse(source).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        kernel = any("triton.jit" in ast.unparse(d) for d in function.decorator_list)
        for node in ast.walk(function):
            for kind, becomes in [*(in_kernel if kernel else in_launcher)(node, function), *in_formula(node)]:
                assert isinstance(node, ast.expr) and node.end_lineno and node.end_col_offset
                begin, end = (
                    starts[node.lineno - 1] + node.col_offset,
                    starts[node.end_lineno - 1] + node.end_col_offset,
                )
                whole = source.encode()
                yield kind, (whole[:begin] + becomes.encode() + whole[end:]).decode()
