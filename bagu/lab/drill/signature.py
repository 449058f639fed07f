"""What an op's spec says, read from its source: importing it would import torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

OPS = Path(__file__).parents[2] / "ops"


@cache
def _tree(op: str) -> ast.Module:
    return ast.parse((OPS / op / "spec.py").read_text(encoding="utf-8"))


def keywords(op: str) -> dict[str, ast.expr]:
    """What an op's spec is made from."""
    made = (
        n.value for n in _tree(op).body if isinstance(n, ast.Assign | ast.AnnAssign) and isinstance(n.value, ast.Call)
    )
    spec = next(call for call in made if isinstance(call.func, ast.Name) and call.func.id == "OpSpec")
    return {str(k.arg): k.value for k in spec.keywords}


def read_spec(op: str) -> tuple[str, str]:
    """The docstring and the signature of an op."""
    found = keywords(op)["signature"]
    parts = found.values if isinstance(found, ast.JoinedStr) else [found]  # only what is kept (after `;`) is inserted
    return str(ast.get_docstring(_tree(op))), "".join(str(p.value) for p in parts if isinstance(p, ast.Constant))


def inputs_of(op: str) -> tuple[list[str], list[str]]:
    """The arguments of an op and its results with their shapes, without what is kept for the backward."""
    inputs, _, outputs = read_spec(op)[1].partition("->")
    return _split(inputs), _split(outputs.partition(";")[0])


def name_of(part: str) -> str:
    """The name of an argument or a result of a signature: `x` of `x[*M, N]: float`."""
    return re.split(r"[\[:]", part)[0]


def _split(signature: str) -> list[str]:
    return [p.strip() for p in re.split(r",(?![^\[]*\])", signature)]


def gradients_of(op: str, fixed: Mapping[str, Any]) -> list[str]:
    """The arguments whose gradients an answer's backward returns."""
    return [name for name in ast.literal_eval(keywords(op)["grads"]) if name not in fixed]
