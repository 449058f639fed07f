"""The labs: every module in the folder of a theme, which defines `LAB`."""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path
from typing import Any

from bagu.errors import BaguError, UnknownName
from bagu.lab.core import Lab

HERE = Path(__file__).parent
THEMES = ("numerics", "model", "train", "post_train", "eval", "parallel", "serve", "gpu")


@cache
def sources() -> dict[str, Path]:
    """The file of every lab by its name: sorted by theme, then by name. Imports none of them."""
    found: dict[str, Path] = {}
    for theme in THEMES:
        files = [*(HERE / theme).glob("*.py"), *(HERE / theme).glob("*/__init__.py")]
        labs = {file.parent.name if file.parent.name != theme else file.stem: file for file in files}
        found |= {name: labs[name] for name in sorted(labs) if name != "__init__"}
    return found


def names() -> list[str]:
    """The names of all labs, sorted. Imports none of them."""
    return sorted(sources())


def theme_of(name: str) -> str:
    return sources()[name].relative_to(HERE).parts[0]


def load(name: str) -> Lab:
    """The lab `name`. An unknown name raises UnknownName with the closest one."""
    if name not in sources():
        raise UnknownName.among("lab", name, names())
    module = importlib.import_module(f"bagu.lab.{theme_of(name)}.{name}")
    lab = getattr(module, "LAB", None)
    if not isinstance(lab, Lab):
        raise BaguError(f"{module.__name__} has no LAB", hint="define LAB = Lab(...) in the module")
    if lab.name != name:
        raise BaguError(f"{module.__name__} names its lab {lab.name!r}", hint="the name must equal the file name")
    return lab


def words(name: str) -> dict[str, Any]:
    """The literals in `LAB = Lab(...)` of a lab: its name, titles, claims, whether it needs a GPU.

    They are read from the source: listing labs must not import the code they measure, which takes seconds.
    """
    file = sources()[name]
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="LAB")], value=ast.Call(keywords=keywords)):
                return {k.arg: k.value.value for k in keywords if k.arg and isinstance(k.value, ast.Constant)}
    raise BaguError(f"{file} has no LAB", hint="define LAB = Lab(...) in the module")
