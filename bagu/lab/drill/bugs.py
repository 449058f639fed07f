"""`bagu drill bug`: bagu's own answer with one bug planted. Solved if every trial is right and at most three lines
differ from the file that was given.

At level triton of an op it is bagu's own kernel, the whole of it in one file (one_file.py), with an edit of
mutations.py. Some edits change what no trial reaches, e.g. a branch for GPUs: a file is given only after the grader
found it wrong, and its first line names the edit, so that `check` finds the same file again. Other levels and drills
have short solutions, where the drill's planted answers are bugs too.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from functools import cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from bagu.errors import ArgumentError, BaguError
from bagu.lab.drill.catalogue import drill as drill_named
from bagu.lab.drill.core import Drill
from bagu.lab.drill.mutations import mutants
from bagu.lab.drill.one_file import own_kernel

if TYPE_CHECKING:
    from bagu.lab.drill.answers import Answers

MOST_LINES = 3
MOST_TRIES = 12
SHORT = {"transpose": "bagu's own kernel takes torch's transposed view, a call that the drill forbids"}
MARK = re.compile(r"^# bagu drill bug (\w+) --level (\w+) --seed (\d+) \(edit (\d+)\)", re.MULTILINE)


def default_level(drill: Drill) -> str:
    """bagu's own kernel where there is one, and Triton to run it."""
    kernel = "triton" in drill.levels and importlib.util.find_spec("triton") is not None
    return "triton" if kernel else drill.levels[0]


def unplanted(drill: Drill, level: str) -> str:
    """What a bug is planted in."""
    if level not in drill.solutions or level == "cuda":
        raise ArgumentError(f"{drill.name} has no answer of bagu's in Python at level {level}", hint="bagu drill list")
    return own_kernel(drill) if drill.op and level == "triton" and drill.name not in SHORT else drill.solutions[level]


def described(drill: Drill, level: str) -> str:
    """What the file is."""
    if drill.op and level == "triton" and drill.name in SHORT:
        return f"bagu's short answer with one bug: {SHORT[drill.name]}"
    whole = bool(drill.op) and level == "triton"
    return (
        f"bagu's {'own kernel in one file' if whole else 'short answer'} with one bug, which the grader has found wrong"
    )


@cache
def _edits(name: str, level: str) -> tuple[str, ...]:
    drill = drill_named(name)
    source = unplanted(drill, level)
    short = source == drill.solutions[level]
    found = [drill.wrong(p) for p in drill.planted if p.level == level and short]
    return (*found, *(changed for _, changed in mutants(source)))


def order(drill: Drill, level: str, seed: int) -> list[int]:
    """The numbers of all edits, in the order in which this seed tries them."""
    numbers = list(range(len(_edits(drill.name, level))))
    Random(f"{drill.name} {level} {seed}").shuffle(numbers)
    return numbers


def planted(drill: Drill, level: str, seed: int, edit: int) -> str:
    """The file with a bug."""
    head = f"# bagu drill bug {drill.name} --level {level} --seed {seed} (edit {edit}): one bug is planted; mend it"
    return f"{head}\n{_edits(drill.name, level)[edit]}"


def wrong(drill: Drill, level: str, seed: int, answers: Answers | None = None) -> str:
    """The first file of this seed that the grader finds wrong."""
    from bagu.lab.drill.grade import answers_or_new, grade  # imports torch

    with answers_or_new(answers, drill, level) as host:
        for edit in order(drill, level, seed)[:MOST_TRIES]:
            source = planted(drill, level, seed, edit)
            if not grade(drill, source, level, seed=seed, answers=host, stop=True).right:
                return source
    raise BaguError(f"no trial sees {MOST_TRIES} edits of seed {seed}", hint="take another seed")


def write_bug(drill: Drill, level: str, seed: int, folder: Path) -> Path:
    """Write the file; one that was changed is not written over."""
    file, source = folder / f"{drill.name}_bug.py", wrong(drill, level, seed)
    if file.exists() and file.read_text(encoding="utf-8", errors="replace") != source:
        raise ArgumentError(f"{file} exists, and has your work in it", hint="move it away, or give --out FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(source, encoding="utf-8")
    return file


def changed_lines(drill: Drill, source: str) -> int | None:
    """How many lines differ from the file that was given; None if the source is no such file."""
    found = MARK.search(source)
    if found is None or found[1] != drill.name or int(found[4]) >= len(_edits(drill.name, found[2])):
        return None
    given = planted(drill, found[2], int(found[3]), int(found[4]))
    lines = difflib.unified_diff(given.splitlines(), source.splitlines(), lineterm="", n=0)
    kinds = [line[0] for line in lines if line[:3] not in ("---", "+++", "@@ ")]
    return max(kinds.count("-"), kinds.count("+"))
