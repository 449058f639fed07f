"""The drills by name: every module of `drills/` defines DRILL, and every other op is a drill made from its spec."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from bagu.errors import ArgumentError, UnknownName
from bagu.lab.drill.core import TOPICS, Drill
from bagu.lab.drill.signature import OPS

HERE = Path(__file__).parent / "drills"


@cache
def written() -> dict[str, Drill]:
    """The drills with texts, hints and solutions of their own, by topic and difficulty."""
    files = sorted(f.stem for f in HERE.glob("*.py") if f.stem != "__init__")
    found = [importlib.import_module(f"bagu.lab.drill.drills.{name}").DRILL for name in files]
    found.sort(key=lambda d: (TOPICS.index(d.topic), d.difficulty, d.name))
    return {d.name: d for d in found}


def ops() -> list[str]:
    """The ops that have no drill of their own."""
    taken = {d.op for d in written().values()}
    return sorted(f.parent.name for f in OPS.glob("*/spec.py") if f.parent.name not in taken)


def drill(name: str) -> Drill:
    """The drill of this name; an unknown name raises UnknownName with the closest one."""
    if name in written():
        return written()[name]
    if name in ops():
        return Drill.of(name)
    raise UnknownName.among("drill", name, [*written(), *ops()])


def level_of(drill: Drill, asked: str | None) -> str:
    """The level asked for, or the drill's first."""
    if asked is None:
        return drill.levels[0]
    if asked not in drill.levels:
        raise UnknownName.among(f"level of {drill.name}", asked, drill.levels)
    return asked


def of_file(file: Path, source: str, name: str | None = None) -> tuple[Drill, str]:
    """The drill and the level that a file answers: by its name, and by whether it is CUDA C or uses Triton."""
    found = drill(name or _named(file, [*written(), *ops()]))
    backward = re.search(r"^def backward\(", source, re.MULTILINE)
    level = "cuda" if file.suffix == ".cu" else "triton_grad" if backward else "triton"
    written_so = file.suffix == ".cu" or "import triton" in source
    if file.suffix == ".cu" and "cuda" not in found.levels:
        raise ArgumentError(f"{found.name} has no level cuda", hint=f"its levels: {', '.join(found.levels)}")
    return found, level if written_so and level in found.levels else found.levels[0]


def file_name(drill: Drill, level: str) -> str:
    """The name of the file that a learner gets."""
    mark = "" if level == drill.levels[0] or level == "cuda" else f"_{level}"
    return f"{drill.name}{mark}.{'cu' if level == 'cuda' else 'py'}"


def _named(file: Path, known: Sequence[str]) -> str:
    stem = file.stem
    for suffix in ("_bug", "_triton_grad", "_triton", "_torch"):
        stem = stem.removesuffix(suffix)
    if stem in known:
        return stem
    raise ArgumentError(f"{file.name} is the name of no drill", hint="name the drill: --drill softmax")
