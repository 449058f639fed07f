"""The dependency direction, as a test: a part imports only what its row lists, and the core nothing optional."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import bagu
from benchmarks.tools.architecture import statements

ROOT = Path(bagu.__file__).parent
ROOTS = {"errors", "types", "config"}  # besides these the package has only parts
TABLE = tomllib.loads((ROOT.parent / "docs/parts.toml").read_text(encoding="utf-8"))
PARTS = {part: set(row["imports"]) for part, row in TABLE.items()}
PARTS |= {"__main__": {"cli"}, "__init__": {"ops", "recipes"}}  # __init__: the lazy names of `import bagu`
OPTIONAL = [
    "triton", "pydantic", "fastapi", "ray", "optuna", "matplotlib", "pynvml", "liger_kernel", "pyarrow", "tensorboard",
    "transformers", "huggingface_hub", "wandb", "lm_eval", "llguidance",
]  # fmt: skip


@cache  # two tests read every file: 3 s of CPU time
def imports(source: str) -> frozenset[str]:
    """The dotted names of bagu that a source file imports, at the top or inside a function."""
    nodes = list(statements(ast.parse(source)))
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    for n in nodes:
        if isinstance(n, ast.ImportFrom):
            assert n.level == 0, "imports are absolute here"
            names += [f"{n.module}.{a.name}" for a in n.names]
    return frozenset(name for name in names if name.split(".")[0] == "bagu")


def wrong_imports(path: Path, source: str) -> list[str]:
    part = path.parts[0].removesuffix(".py")
    allowed = PARTS.get(part, set()) | {part}
    found = {name.split(".")[1] for name in imports(source) if "." in name} & PARTS.keys()
    return [f"{path} imports bagu.{name}; {part} may import {sorted(allowed)}" for name in found - allowed]


def modules() -> dict[str, Path]:
    files = sorted(ROOT.rglob("*.py"))
    names = [".".join(("bagu", *f.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__") for f in files]
    return dict(zip(names, files, strict=True))


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or through others."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set(), [start]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        reached[start] = seen
    groups = {frozenset(m for m in reached[n] if n in reached[m]) for n in graph if n in reached[n]}
    return sorted(sorted(g) for g in groups)


def test_every_import_points_down() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 10
    assert [w for f in files for w in wrong_imports(f.relative_to(ROOT), f.read_text())] == []


def test_the_root_has_four_modules_and_the_parts() -> None:
    files, folders = {f.stem for f in ROOT.glob("*.py")}, {f.parent.name for f in ROOT.glob("*/*.py")}
    assert files | folders == ROOTS | PARTS.keys() | {"__init__"}


@pytest.mark.parametrize("part", TABLE)
def test_a_part_keeps_to_its_budget_of_lines(part: str) -> None:
    lines = sum(len(f.read_bytes().splitlines()) for f in (ROOT / part).rglob("*.py"))
    assert lines <= TABLE[part]["lines"], f"{part} has {lines} lines: shorten it, or raise docs/parts.toml and say why"


def test_the_page_of_the_parts_is_up_to_date() -> None:
    script = ROOT.parent / "benchmarks/tools/architecture.py"
    run = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr


def test_no_two_files_import_each_other() -> None:
    """A package's __init__ that gathers names does not count: importing a file of it is not importing the others."""
    files = modules()
    graph = {
        name: {n if n in files else n.rpartition(".")[0] for n in imports(path.read_text())} & files.keys()
        for name, path in files.items()
        if path.name != "__init__.py"
    }
    assert cycles({name: needs & graph.keys() for name, needs in graph.items()}) == []


def test_a_cycle_is_seen() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_an_upward_import_is_seen() -> None:
    assert wrong_imports(Path("bench/ops.py"), "def f():\n    from bagu import lab")
    assert wrong_imports(Path("config/tree.py"), "import bagu.ops.contract.core")
    assert not wrong_imports(Path("nn/norm.py"), "from bagu.ops import rms_norm")


WITHOUT_OPTIONAL = """
import importlib, os, sys
sys.modules.update(dict.fromkeys({optional!r}))  # None there makes the import fail
import torch
for module in ("bagu.recipes.demo", "bagu.recipes.command", "bagu.serve.engine", "bagu.lab.run", "bagu.cli"):
    if (child := os.fork()) == 0:
        importlib.import_module(module)
        import bagu.ops
        y = bagu.ops.rms_norm(torch.ones(2, 8), torch.ones(8))
        assert torch.allclose(y, torch.ones(2, 8))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, module
print("all imported")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_core_imports_and_runs_without_anything_optional() -> None:
    """Each module in a process where importing any optional library fails, forked from one that has imported torch."""
    script = WITHOUT_OPTIONAL.format(optional=OPTIONAL)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "all imported\n"), run.stderr
