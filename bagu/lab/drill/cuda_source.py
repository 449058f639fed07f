"""Level cuda: the file of an answer, CUDA C with one kernel. Its parameters are the op's arguments in fp32, its result,
and the rows M and columns N of the first tensor; a comment says how it is launched:

    // launch: M, 256              blocks, threads in a block; arithmetic of M and N, min and max

Imports no torch.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bagu.errors import ArgumentError
from bagu.lab.drill.signature import name_of

LAUNCH = re.compile(r"^// launch: *(.+)$", re.MULTILINE)
POINTERS = {"bool": "const unsigned char*", "int": "const long long*"}
SCALARS = {"float": "float", "int": "long long"}
MOST_BLOCKS, MOST_THREADS = 2**31 - 1, 1024
ARITHMETIC: Mapping[type, Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def parameter(part: str) -> str:
    """An argument of a signature as a parameter of the kernel."""
    kind = part.rpartition(":")[2].strip().rstrip("?") if ":" in part else ""
    types = POINTERS if "[" in part else SCALARS
    return f"{types.get(kind, 'const float*')} {name_of(part)}"


def stub(task: str, inputs: Sequence[str], results: Sequence[str]) -> str:
    """The file that a learner starts from."""
    parameters = ",\n    ".join([*map(parameter, inputs), f"float* {name_of(results[0])}", "long long M, long long N"])
    said = "\n".join(f"// {line}".rstrip() for line in task.strip().splitlines())
    return f"""{said}
//
// Every tensor is packed; the pointer of an argument that is None is null. M: rows of the first tensor, N: its columns.
// The next line says how the kernel is launched: blocks, threads in a block (`+ - * / %`, min and max of M and N).
// launch: M, 256
extern "C" __global__ void kernel(
    {parameters}) {{
}}
"""


def launch(source: str, M: int, N: int) -> tuple[int, int]:
    """The blocks and the threads that the source asks for."""
    found = LAUNCH.findall(source)
    if len(found) != 1:
        hint = "write one comment such as `// launch: M, 256`"
        raise ArgumentError(f"{len(found)} lines begin with `// launch:`, expected one", hint=hint)
    try:
        parts = ast.parse(f"({found[0]},)", mode="eval").body
        assert isinstance(parts, ast.Tuple)
        blocks, threads = (_value(node, {"M": M, "N": N}) for node in parts.elts)
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        raise ArgumentError(
            f"`// launch: {found[0]}`: {error}", hint="blocks, threads: whole numbers, M and N"
        ) from None
    if not (0 < blocks <= MOST_BLOCKS and 0 < threads <= MOST_THREADS):
        raise ArgumentError(
            f"`// launch: {found[0]}` is {blocks}, {threads} for M = {M}, N = {N}",
            hint=f"at least one of each, at most {MOST_THREADS} threads",
        )
    return blocks, threads


def _value(node: ast.expr, names: Mapping[str, Any]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return int(names[node.id])
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return ARITHMETIC[type(node.op)](_value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        return (min if node.func.id == "min" else max)(_value(a, names) for a in node.args)
    raise ValueError(f"`{ast.unparse(node)}` is no arithmetic of M and N")
