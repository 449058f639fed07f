"""The rooms of train: few loose files, and GRPO is read in its own folder."""

from __future__ import annotations

import ast
from pathlib import Path

import bagu.train

ROOT = Path(bagu.train.__file__).parent


def train_imports(file: Path) -> set[Path]:
    """The files of train that a file imports."""
    nodes = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom) and n.module]
    names = [n.module for n in nodes if n.module.startswith("bagu.train.")]
    return {path for name in names if (path := ROOT.parent.parent / f"{name.replace('.', '/')}.py").is_file()}


def test_train_has_at_most_16_loose_files() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 16


def test_grpo_is_read_without_leaving_its_folder_more_than_twice() -> None:
    todo, seen, left = [ROOT / "rl/grpo.py"], set[Path](), set[Path]()
    while todo:
        file = todo.pop()
        seen.add(file)
        found = train_imports(file) - seen
        todo += [f for f in found if f.parent.name == "rl"]
        left |= {f for f in found if f.parent.name != "rl"}
    assert len(seen) > 5 and {f.name for f in left} == {"loss.py", "objective.py"}
