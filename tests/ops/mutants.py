"""Planted bugs: a Triton backend's kernels, each with one thing made wrong.

    zero        a store writes zeros: a lost output, a zero gradient
    short       a bound `a < N` becomes `a < N - 1`: a lost last row or column
    no eps      `… + eps` loses the eps
    max         a sum becomes a maximum
    no select   `tl.where(c, a, b)` becomes a: a mask that masks nothing

Conformance must notice each of them. Mutants that mean the same as the original are named in EQUIVALENT, with why.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from bagu.ops.core import OpSpec, check
from bagu.ops.dispatch import paired

CPU_NAN = "a NaN becomes the integer 0 on a CPU, as it should; on a GPU it would not"
EQUIVALENT = {  # (op, mutant) -> why no test can see it
    ("quantize_int8", "no select: _inverse: tl.where(scale > 0.0, scale, float('inf'))"): CPU_NAN,
    ("quantize_int8", "no select: _rounded: tl.where(inverse > 0.0, q, 0)"): CPU_NAN,
}


@dataclass(frozen=True)
class Mutant:
    kind: str
    kernel: str
    was: str  # the source that was changed
    source: str  # the whole module, changed

    def __str__(self) -> str:
        return f"{self.kind}: {self.kernel}: {self.was}"


def mutants(source: str) -> Iterator[Mutant]:
    """Every mutant of every @triton.jit function of a module."""
    tree = ast.parse(source)
    for at, node in enumerate(tree.body):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            for i, inner in enumerate(ast.walk(node)):
                for kind in _kinds(inner):
                    changed = copy.deepcopy(tree)
                    target = next(itertools.islice(ast.walk(changed.body[at]), i, None))
                    was = ast.unparse(target)
                    _apply(kind, target)
                    yield Mutant(kind, node.name, was, ast.unparse(ast.fix_missing_locations(changed)))


def _calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def _kinds(node: ast.AST) -> Iterator[str]:
    if _calls(node, "tl.store"):
        yield "zero"
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt):
        yield "short"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and ast.unparse(node.right) == "eps":
        yield "no eps"
    if _calls(node, "tl.sum"):
        yield "max"
    if _calls(node, "tl.where"):
        yield "no select"


def _apply(kind: str, node: ast.AST) -> None:
    if isinstance(node, ast.Call):
        if kind == "zero":
            node.args[1] = ast.parse(f"({ast.unparse(node.args[1])}) * 0", mode="eval").body
        elif kind == "max":
            node.func = ast.parse("tl.max", mode="eval").body
        elif kind == "no select":
            node.args[2] = copy.deepcopy(node.args[1])
    elif isinstance(node, ast.Compare):
        node.comparators[0] = ast.parse(f"({ast.unparse(node.comparators[0])}) - 1", mode="eval").body
    elif isinstance(node, ast.BinOp):
        node.right = ast.Constant(0.0)


def load(source: str, folder: Path) -> ModuleType:
    """The mutated module, from a file of its own: Triton reads a kernel's source from where it was defined."""
    path = folder / f"mutant_{abs(hash(source))}.py"
    path.write_text(source)
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module


def survives(spec: OpSpec, mutant: Mutant) -> bool:
    """Whether every small case passes with the mutant in place. In a child process: a mutant may well crash."""
    child = os.fork()
    if child == 0:
        code = 0
        try:
            with tempfile.TemporaryDirectory() as folder:
                module = load(mutant.source, Path(folder))
                fn = paired(spec, module.forward, getattr(module, "backward", None))
                for case in (c for c in spec.cases if not c.bench):
                    check(spec, case, torch.float32, fn)
        except BaseException:  # however it failed, the bug was noticed
            code = 1
        os._exit(code)
    return os.waitpid(child, 0)[1] == 0
