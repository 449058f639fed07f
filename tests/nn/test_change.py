"""Other parts change a model through bagu/nn/change.py only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import bagu

PARTS = ("train", "parallel", "serve", "recipes", "eval", "data")
HOOKS = ("register_forward_hook", "register_forward_pre_hook", "add_module")


def changes(source: str) -> list[str]:
    """The statements that set a forward, the memory of a parameter or the modules inside, or that add hooks."""
    found = []
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        names = [t.value if isinstance(t, ast.Subscript) else t for t in targets]
        for name in names:
            attribute = name.attr if isinstance(name, ast.Attribute) else None
            own = isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name) and name.value.id == "self"
            if attribute in ("forward", "data", "_modules", "visit") and not own:
                found.append(ast.unparse(node))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in HOOKS:
            found.append(ast.unparse(node))
    return found


def test_a_model_is_changed_by_the_listed_ways_only() -> None:
    root = Path(bagu.__file__).parent
    files = [file for part in PARTS for file in sorted((root / part).rglob("*.py"))]
    assert [f"{file.relative_to(root)}: {line}" for file in files for line in changes(file.read_text())] == []


@pytest.mark.parametrize(
    "line",
    [
        "block.forward = f", "p.data = x", "twin._modules = {}", "del model._modules['critic']", "del block.forward",
        "block.register_forward_hook(f)", "model.add_module('critic', c)", "layer.visit = f",
    ],
)  # fmt: skip
def test_other_changes_are_seen(line: str) -> None:
    assert changes(line) == [line]
