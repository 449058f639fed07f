"""The list of labs: every module of `bagu.lab.labs`, which defines `LAB`."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path
from typing import Any

from bagu.errors import BaguError, UnknownName
from bagu.lab import labs
from bagu.lab.core import Lab


def names() -> list[str]:
    """The names of all labs, sorted. Imports none of them."""
    return sorted(module.name for module in pkgutil.iter_modules(labs.__path__))


def load(name: str) -> Lab:
    """The lab `name`. An unknown name raises UnknownName with the closest one."""
    if name not in names():
        raise UnknownName.among("lab", name, names())
    module = importlib.import_module(f"{labs.__name__}.{name}")
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
    folder = Path(labs.__path__[0])
    file = folder / name / "__init__.py" if (folder / name).is_dir() else folder / f"{name}.py"
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="LAB")], value=ast.Call(keywords=keywords)):
                return {k.arg: k.value.value for k in keywords if k.arg and isinstance(k.value, ast.Constant)}
    raise BaguError(f"{file} has no LAB", hint="define LAB = Lab(...) in the module")
