"""The dependency direction, as a test: a part imports only what its row lists, and the core nothing optional."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bagu

ROOT = Path(bagu.__file__).parent
PARTS = {  # besides the root modules, which import no part and are open to all
    "ops": set(),
    "data": set(),
    "nn": {"ops"},
    "parallel": {"ops", "nn"},
    "train": {"ops", "nn", "data", "parallel"},
    "eval": {"ops", "nn", "data"},
    "serve": {"ops", "nn", "parallel"},
    "lab": {"ops", "nn", "data", "parallel", "train", "eval", "serve"},
    "recipes": {"ops", "nn", "data", "parallel", "train", "eval", "serve"},
    "cli.py": {"ops", "nn", "data", "parallel", "train", "eval", "serve", "lab", "recipes"},
}
OPTIONAL = [
    "triton", "pydantic", "fastapi", "ray", "optuna", "matplotlib", "pynvml", "liger_kernel", "pyarrow", "tensorboard",
    "transformers", "huggingface_hub", "wandb",
]  # fmt: skip


def imported_parts(source: str) -> set[str]:
    """The parts a source file imports, at the top or inside a function."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    for n in nodes:
        if isinstance(n, ast.ImportFrom):
            assert n.level == 0, "imports are absolute here"
            names += [f"{n.module}.{a.name}" for a in n.names]
    return {parts[1] for name in names if (parts := name.split("."))[0] == "bagu" and len(parts) > 1} & PARTS.keys()


def wrong_imports(path: Path, source: str) -> list[str]:
    part = path.parts[0]
    allowed = PARTS.get(part, set()) | {part}
    return [
        f"{path} imports bagu.{name}; {part} may import {sorted(allowed)}"
        for name in imported_parts(source)
        if name not in allowed
    ]


def test_every_import_points_down() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 10
    assert [w for f in files for w in wrong_imports(f.relative_to(ROOT), f.read_text())] == []


def test_an_upward_import_is_seen() -> None:
    assert wrong_imports(Path("bench/ops.py"), "def f():\n    from bagu import lab")
    assert wrong_imports(Path("device.py"), "import bagu.ops.core")
    assert not wrong_imports(Path("nn/norm.py"), "from bagu.ops import rms_norm")


@pytest.mark.parametrize(
    "module", ["bagu.recipes.demo", "bagu.recipes.command", "bagu.serve.engine", "bagu.lab.run", "bagu.cli"]
)
def test_the_core_imports_and_runs_without_anything_optional(module: str) -> None:
    """In a fresh process where importing any optional library fails."""
    script = (
        f"import sys\nsys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"  # None there makes the import fail
        f"import {module}\n"
        "import torch, bagu.ops\n"
        "y = bagu.ops.rms_norm(torch.ones(2, 8), torch.ones(8))\n"
        "assert torch.allclose(y, torch.ones(2, 8))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
