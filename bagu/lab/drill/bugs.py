"""`bagu drill bug`: bagu's own answer with one bug planted. Solved if every trial is right and at most three lines
differ from the file that was given."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from random import Random

from bagu.errors import ArgumentError
from bagu.lab.drill.core import Drill
from bagu.lab.drill.mutations import mutants

MOST_LINES = 3
MARK = re.compile(r"^# bagu drill bug (\w+) --level (\w+) --seed (\d+)", re.MULTILINE)


def planted(drill: Drill, level: str, seed: int) -> str:
    """The file with a bug: one of the drill's planted answers, or a change of one expression."""
    if level not in drill.solutions:
        raise ArgumentError(f"{drill.name} has no answer of bagu's at level {level}", hint="bagu drill list")
    found = [drill.wrong(p) for p in drill.planted if p.level == level]
    found += [source for _, source in mutants(drill.solutions[level])]
    chosen = Random(f"{drill.name} {level} {seed}").choice(found)
    return f"# bagu drill bug {drill.name} --level {level} --seed {seed}: one bug is planted; mend it\n{chosen}"


def write_bug(drill: Drill, level: str, seed: int, folder: Path) -> Path:
    """Write the file; one that was changed is not written over."""
    file, source = folder / f"{drill.name}_bug.py", planted(drill, level, seed)
    if file.exists() and file.read_text(encoding="utf-8", errors="replace") != source:
        raise ArgumentError(f"{file} exists, and has your work in it", hint="move it away, or give --out FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(source, encoding="utf-8")
    return file


def changed_lines(drill: Drill, source: str) -> int | None:
    """How many lines differ from the file that was given; None if the source is no such file."""
    found = MARK.search(source)
    if found is None or found[1] != drill.name:
        return None
    given = planted(drill, found[2], int(found[3]))
    lines = difflib.unified_diff(given.splitlines(), source.splitlines(), lineterm="", n=0)
    kinds = [line[0] for line in lines if line[:3] not in ("---", "+++", "@@ ")]
    return max(kinds.count("-"), kinds.count("+"))
