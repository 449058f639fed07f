"""Planted bugs: the source of a backend with one thing made wrong. Conformance must notice each of them.

In kernels:
    zero        a store writes zeros: a lost output, a zero gradient
    short       a bound `a < N` becomes `a < N - 1`: a lost last row or column
    max         a sum becomes a maximum
    one trip    a loop over rows, blocks or programs ends after its first trip
    stride      the stride of another tensor is used
In kernels and in the torch backends:
    no eps      `… + eps` loses the eps
    no select   `where(c, a, b)` becomes a: a mask that masks nothing
In launchers and in the torch backends:
    default     a scalar argument is ignored, and the usual value is used
In launchers:
    packed      the stride of a tensor becomes what it would be without gaps
    swapped     the stride of a tensor becomes that of its neighbour

A bug counts as caught if a comparison of `check` fails at some point of conformance, in any op that can reach the
function. One that ends in another error or kills its process is not: see `Verdict`.
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import itertools
import json
import os
import re
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch._inductor.config  # `check` imports it: 1.6 s of CPU, here once instead of in every child process

from bagu.errors import ConformanceError
from bagu.lab.drill import mutations
from bagu.ops.catalogue import SPECS
from bagu.ops.contract import core
from bagu.ops.contract.core import OpSpec, Streams, check
from tests.ops import sources
from tests.ops.points import Point, other_points, points, run_as
from tests.ops.reaching import reached_at

NOT_NONE = ", not None"
RECORD = re.compile(r"\b(?:a|args)\.(?=[a-z])")  # a field of the record of an op's arguments
SECONDS = 300  # for all points of an op with one mutant; past this it counts as dead


@dataclass(frozen=True)
class Mutant:
    backend: str
    kind: str
    module: str
    function: str
    was: str  # the expression that is changed; of a name, with the expression around it
    becomes: str  # another expression; of a scalar that is ignored its name, and NOT_NONE where None has no meaning
    at: tuple[int, int]  # where it is: which statement of the module, which node of that

    @property
    def source(self) -> str:
        """The whole module, changed."""
        changed = copy.deepcopy(sources.tree(self.module))
        target = next(itertools.islice(ast.walk(changed.body[self.at[0]]), self.at[1], None))
        other = _expression(repr(self._default()) if self.kind == "default" else self.becomes)
        target.__class__ = other.__class__
        target.__dict__ = other.__dict__
        return ast.unparse(ast.fix_missing_locations(changed))

    def _default(self) -> Any:
        """What a scalar that is ignored becomes."""
        name = self.becomes.removesuffix(NOT_NONE)
        op = next(
            op for op in sources.users(self.module, self.function, self.backend)
            if name in (s.name for s in SPECS[op].sig.scalars)
        )  # fmt: skip
        return statistics.mode(v for v in values(op, name) if v is not None or name == self.becomes)

    def __str__(self) -> str:
        return f"{self.module.removeprefix('bagu.ops.')}: {self.kind}: {self.function}: {self.was}"


def mutants(backend: str, module: str) -> Iterator[Mutant]:
    """Every mutant of the functions of a module that ops with this backend can reach."""
    reached = {node.name for node in sources.functions(module, backend)}
    for at, node in enumerate(sources.tree(module).body):
        if not isinstance(node, sources.Function) or node.name not in reached:
            continue
        around = {child: parent for parent in ast.walk(node) for child in ast.iter_child_nodes(parent)}
        for i, inner in enumerate(ast.walk(node)):
            parent = around.get(inner)
            for kind, becomes in _changes(inner, parent, node, backend, module):
                yield Mutant(backend, kind, module, node.name, _text(inner, parent), becomes, (at, i))


def _text(node: ast.AST, parent: ast.AST | None) -> str:
    """The source of a node, a field of a record as its name. A name alone does not say which of its uses is changed."""
    text, named = RECORD.sub("", ast.unparse(node)), isinstance(node, ast.Name | ast.Attribute)
    if named and text.isidentifier() and isinstance(parent, ast.expr | ast.keyword):
        return f"{text} in {RECORD.sub('', ast.unparse(parent))}"
    return text


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _changes(
    node: ast.AST, parent: ast.AST | None, function: sources.Function, backend: str, module: str
) -> Iterator[tuple[str, str]]:
    """(kind, what the node becomes) of each bug that can be planted at this node."""
    kernel = backend == "triton" and sources.is_kernel(function)
    if kernel:
        yield from mutations.in_kernel(node, function)
    if kernel or backend == "torch":
        yield from mutations.in_formula(node)
    if not kernel:
        yield from _ignored_scalar(node, parent, function, backend, module)
        if backend == "triton":
            yield from mutations.in_launcher(node, function)


def _ignored_scalar(
    node: ast.AST, parent: ast.AST | None, function: sources.Function, backend: str, module: str
) -> Iterator[tuple[str, str]]:
    if not (isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)):
        return
    name = RECORD.sub("", ast.unparse(node))
    if _only_raises(function.name) or (isinstance(parent, ast.Call) and _only_raises(ast.unparse(parent.func))):
        return
    ops, kinds = sources.users(module, function.name, backend), _parameters(function)
    known = {s.name: s.optional for op in ops for s in SPECS[op].sig.scalars}
    field = isinstance(node, ast.Attribute)
    if name in known and (field or (name in kinds and (not known[name] or "None" in kinds[name]))):
        number = isinstance(parent, ast.BinOp) or (
            parent is not None and any(mutations.calls(parent, f) for f in ("min", "max"))
        )
        yield "default", name + NOT_NONE if known[name] and number else name


def _only_raises(function: str) -> bool:
    """Whether a function checks arguments. It computes nothing to compare; its tests expect the error."""
    return function.rpartition(".")[2].lstrip("_").startswith("check")


@cache
def _parameters(function: sources.Function) -> dict[str, str]:
    """The scalar parameters of a function that it does not assign, and what they are annotated with."""
    if not isinstance(function, ast.FunctionDef):
        return {}
    args = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    kinds = {a.arg: ast.unparse(a.annotation) for a in args if a.annotation is not None}
    assigned = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return {name: kind for name, kind in kinds.items() if kind.split()[0] in SCALARS and name not in assigned}


SCALARS = ("float", "int", "bool", "str")


class _Usual(Streams):
    def choice(self, name: str, usual: Any, *others: Any) -> Any:
        return usual


@cache
def values(op: str, scalar: str) -> list[Any]:
    """The value of a scalar argument in each small case, the usual one where the case draws it."""
    spec = SPECS[op]
    return [spec.inputs(case, _Usual(op, case.name))[scalar] for case in spec.cases if not case.bench]


class _Finder(MetaPathFinder):
    """Imports changed modules from their own files: Triton reads a kernel's source from where it was defined."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self.paths = paths

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.paths:
            return None
        return importlib.util.spec_from_file_location(fullname, self.paths[fullname])


def replace_modules(changed: Mapping[str, str], backend: str, folder: Path) -> None:
    """Make these sources the ones of their modules, and forget every module that has imported the old ones.

    For a process that ends with the check.
    """
    paths = {module: folder / f"{module}.py" for module in changed}
    for module, path in paths.items():
        path.write_text(changed[module])
    sys.meta_path.insert(0, _Finder(paths))
    stale = set(changed)
    everything = sources.modules(backend)
    while more := {m for m in everything if m not in stale and sources.imports(m) & stale}:
        stale |= more
    for module in stale:
        sys.modules.pop(module, None)
        parent, _, name = module.rpartition(".")
        if isinstance(getattr(sys.modules.get(parent), name, None), ModuleType):
            delattr(sys.modules[parent], name)
    core.interpreted_sms = importlib.import_module("bagu.ops.kernels.launch").interpreted_sms


class Verdict(NamedTuple):
    """What became of a mutant. `outcome` is "caught" by a comparison, "survived" them all, or "died": another error."""

    outcome: str
    detail: str = ""


def in_child(work: Any) -> Verdict:
    """The verdict of a function, called in a child process: a mutant may well crash."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # a parent's OpenMP threads are not in its child, which would wait for them for ever
        signal.alarm(SECONDS)
        try:
            verdict = work()
        except BaseException as error:
            verdict = Verdict("died", f"{type(error).__name__}: {error}"[:300])
        with os.fdopen(write, "w") as pipe:
            json.dump(verdict, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    status = os.waitpid(child, 0)[1]
    return Verdict(*json.loads(said)) if said else Verdict("died", f"signal {os.WTERMSIG(status)}")


@cache
def ordered(op: str, backend: str) -> list[Point]:
    """The points of conformance, small inputs first."""
    spec = SPECS[op]
    size = {
        p.case.name: sum(
            v.numel() for v in spec.inputs(p.case, Streams(op, p.case.name)).values() if isinstance(v, torch.Tensor)
        )
        for p in points(spec, backend)
    }
    return sorted([*points(spec, backend), *other_points(spec)], key=lambda p: size[p.case.name])


def reaching(op: str, mutant: Mutant) -> list[Point]:
    """The points of an op at which it runs the function that is changed. Torch backends are fast: all points."""
    at, name = ordered(op, mutant.backend), (mutant.module, mutant.function)
    return at if mutant.backend == "torch" else [p for p in at if name in reached_at(op, p)]


def _judge(spec: OpSpec, changed: Mapping[str, str], backend: str, at: Sequence[Point]) -> Verdict:
    """The first comparison that fails, if one does; else the first error of another kind."""
    died = None
    with tempfile.TemporaryDirectory() as folder:
        replace_modules(changed, backend, Path(folder))
        module = importlib.import_module(sources.backend_module(spec, backend))
        for i, point in enumerate(at):
            try:
                run = run_as(spec, backend, point.dtype, module)
                check(spec, point.case, point.dtype, run, backend=backend, layout=point.layout)
            except ConformanceError:
                return Verdict("caught", str(i))
            except Exception as error:
                died = died or Verdict("died", f"{point}: {type(error).__name__}: {error}"[:300])
    return died or Verdict("survived")


def verdict(mutant: Mutant) -> Verdict:
    """Whether conformance catches a mutant, in one of the ops that can reach it.

    A comparison that fails counts if it passes with the same module unchanged; else the points after it are tried.
    """
    worst = Verdict("survived")
    for op in sources.users(mutant.module, mutant.function, mutant.backend):
        found, at = Verdict("caught"), reaching(op, mutant)
        while found.outcome == "caught":
            found = in_child(partial(_judge, SPECS[op], {mutant.module: mutant.source}, mutant.backend, at))
            if found.outcome == "caught":
                point, at = at[int(found.detail)], at[int(found.detail) + 1 :]
                if control_at(op, mutant.backend, mutant.module, point).outcome == "survived":
                    return Verdict("caught", f"{op} {point}")
        worst = found if found.outcome == "died" else worst
    return worst


@cache
def control_at(op: str, backend: str, module: str, point: Point) -> Verdict:
    """The verdict on a module that was loaded as a mutant is, and is not changed."""
    unchanged = {module: ast.unparse(sources.tree(module))}
    return in_child(lambda: _judge(SPECS[op], unchanged, backend, [point]))
