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
import importlib
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
from bagu.ops.custom import paired

UNUSED = "without label smoothing the plain sums are unused, and padded rows have no head"
CPU_NAN = "a NaN becomes the integer 0 on a CPU, as it should; on a GPU it would not"
SELECT = "no select: rsqrt: tl.where((x > 0.0) & (x < float('inf')), r + r * (0.5 - 0.5 * (x * r) * r), r)"
NO_INF = "a variance is NaN before it is infinite, and eps keeps it from 0"
FINITE = "dy is finite in every case; test_softmax plants NaN in it"
AHEAD = "a program has one row unless it is tuned otherwise: test_every_tuning has odd rows too"
EQUIVALENT = {  # (op, mutant) -> why no test can see it
    **{
        (op, "short: rsqrt: x < float('inf')"): "inf - 1 is inf"
        for op in ("add_rms_norm", "group_norm", "layer_norm", "rms_norm")
    },
    **{
        ("rms_norm", f"zero: {kernel}: tl.store(s_ptr + {store})"): "RMSNorm has no addend"
        for kernel, store in (
            ("_forward", "row + n, s, real"),
            ("_forward", "m * N + at, ends, last"),
            ("_forward_wide", "first + at, ends, end"),
            ("_forward_wide", "row + i, x, real"),
        )
    },
    **{
        (op, "zero: _shift: tl.store(shifted_b_ptr + k * step + n, tl.load(b_ptr + (n + k) % N))"): "no bias"
        for op in ("rms_norm", "add_rms_norm", "dequantize_int8")
    },
    **{(op, "short: _forward: ahead < M"): AHEAD for op in ("rms_norm", "add_rms_norm")},
    ("softmax", "no select: _heard: tl.where(y != 0, dy, 0.0)"): FINITE,
    ("softmax", "no select: _backward: tl.where(y != 0, dy, 0.0)"): FINITE,
    ("softmax", "no select: _backward: tl.where(y_ends != 0, dy_ends, 0.0)"): FINITE,
    (
        "softmax",
        "no select: _backward_wide: tl.where(y_ends != 0, tl.load(dy_ptr + first + at, end, 0.0).to(ACC), 0.0)",
    ): FINITE,
    ("softmax", "no select: _weigh: tl.where(y != 0, dy, 0.0)"): FINITE,
    ("group_norm", SELECT): NO_INF,
    ("layer_norm", SELECT): NO_INF,
    **{
        ("linear_cross_entropy", mutant): UNUSED
        for mutant in (
            "no select: _ends: tl.where(e >= G, last * G + e - G, e)",
            "short: _ends: at < first * G",
            "short: _ends: e < G",
            "max: _forward: tl.sum(plain, axis=0)",
            "max: _forward: tl.sum(tl.where(mine, ends, 0.0), axis=0)",
            "max: _forward: tl.sum(tl.where(real, x, 0.0), axis=1)",
            "zero: _forward: tl.store(part + 2, flat)",
            "no select: _forward: tl.where(mine, ends, 0.0)",
            "no select: _forward: tl.where(real, x, 0.0)",
            "max: _combine: tl.sum(tl.load(part + 2, s < splits, 0.0), axis=0)",
            "short: _combine: s < splits",
        )
    },
    ("batch_norm", "short: _statistics: m2 < 0.0"): "a guard against rounding, not an index bound",
    ("group_norm", "short: _statistics: m2 < 0.0"): "a guard against rounding, not an index bound",
    ("quantize_int8", "short: apart: e < VEC"): "it reads a column of the body twice, which changes no maximum",
    **{
        (op, "short: apart: BLOCK_N + e < N"): "only of odd rows is anything apart"
        for op in ("quantize_int8", "softmax")
    },
    ("quantize_int8", "no select: _inverse: tl.where(scale > 0.0, scale, float('inf'))"): CPU_NAN,
    ("quantize_int8", "no select: _rounded: tl.where(inverse > 0.0, q, 0)"): CPU_NAN,
}


@dataclass(frozen=True)
class Mutant:
    kind: str
    kernel: str
    was: str  # the source that was changed
    module: str
    source: str  # the whole module, changed

    def __str__(self) -> str:
        return f"{self.kind}: {self.kernel}: {self.was}"


def mutants(spec: OpSpec) -> Iterator[Mutant]:
    """Every mutant of every kernel of an op: those its imports lead to, then those in its Triton backend.

    Kernels of another op are that op's business, unless this one has none of its own.
    """
    return _led_to(backend_module(spec), None)


def _led_to(module: str, wanted: set[str] | None) -> Iterator[Mutant]:
    own = list(_of_module(module, wanted))
    for node in ast.walk(ast.parse(_source(module))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bagu.ops."):
            names = {a.name for a in node.names}
            if not str(node.module).endswith(".triton_backend"):
                yield from _of_module(str(node.module), names)
            elif not own:
                yield from _led_to(str(node.module), names)
    yield from own


def backend_module(spec: OpSpec) -> str:
    return f"bagu.ops.{spec.name}.triton_backend"


def _of_module(module: str, wanted: set[str] | None) -> Iterator[Mutant]:
    """The mutants of a module's @triton.jit functions; only of those that the `wanted` names lead to."""
    tree = ast.parse(_source(module))
    reached = _reached(tree, wanted) if wanted is not None else None
    for at, node in enumerate(tree.body):
        if not isinstance(node, ast.FunctionDef) or not any("jit" in ast.unparse(d) for d in node.decorator_list):
            continue
        if reached is not None and node.name not in reached:
            continue
        for i, inner in enumerate(ast.walk(node)):
            for kind in _kinds(inner):
                changed = copy.deepcopy(tree)
                target = next(itertools.islice(ast.walk(changed.body[at]), i, None))
                was = ast.unparse(target)
                _apply(kind, target)
                yield Mutant(kind, node.name, was, module, ast.unparse(ast.fix_missing_locations(changed)))


def _reached(tree: ast.Module, wanted: set[str]) -> set[str]:
    """The top-level names of a module that these lead to, themselves included."""
    uses = {
        name: {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} for node in tree.body for name in _defines(node)
    }
    reached, new = set(), set(wanted)
    while new:
        reached |= new
        new = {u for name in new for u in uses.get(name, ())} - reached
    return reached


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [t.id for t in node.targets if isinstance(t, ast.Name)]
    return []


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


def _source(module: str) -> str:
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None, module
    return Path(found.origin).read_text()


def load(spec: OpSpec, mutant: Mutant, folder: Path) -> ModuleType:
    """The op's Triton backend with the mutant in place of its module.

    The mutant gets a file of its own: Triton reads a kernel's source from where it was defined. For a process that ends
    with the check: other modules of kernels are loaded anew.
    """
    path = folder / f"{mutant.module.rpartition('.')[2]}.py"
    path.write_text(mutant.source)
    found = importlib.util.spec_from_file_location(mutant.module, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[mutant.module] = module
    found.loader.exec_module(module)
    for name in [n for n in sys.modules if n.startswith("bagu.ops.") and n.endswith((".triton_backend", "kernels"))]:
        if name != mutant.module:  # whoever has the module's old functions must ask for them again
            del sys.modules[name]
    return importlib.import_module(backend_module(spec))


def survives(spec: OpSpec, mutant: Mutant) -> bool:
    """Whether every small case passes with the mutant in place. In a child process: a mutant may well crash."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # a parent's OpenMP threads are not in its child, which would wait for them for ever
        code = 0
        try:
            with tempfile.TemporaryDirectory() as folder:
                module = load(spec, mutant, Path(folder))
                fn = paired(spec, module.forward, getattr(module, "backward", None))
                for dtype, case in itertools.product((torch.float32, torch.float16), spec.cases):
                    if not case.bench:
                        check(spec, case, dtype, fn)
        except BaseException:  # however it failed, the bug was noticed
            code = 1
        os._exit(code)
    return os.waitpid(child, 0)[1] == 0
