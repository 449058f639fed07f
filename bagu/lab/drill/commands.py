"""What `bagu drill check` and the commands that run an answer do."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from bagu.lab.drill import catalogue, words
from bagu.lab.drill.core import Drill, language
from bagu.lab.drill.grade import Grade, grade, read_answer
from bagu.lab.drill.progress import Attempt, Progress


def check_file(
    file: Path, name: str | None, level: str | None, *, seed: int | None = None, lang: str | None = None
) -> int:
    """Grade a file, print the verdict, and note it. Returns 0 if it is right."""
    found, graded = graded_file(file, name, level, seed=seed)
    for line in words.verdict(graded, language(lang)):
        print(line)
    note(found, graded)
    return 0 if graded.right else 1


def graded_file(file: Path, name: str | None, level: str | None, *, seed: int | None = None) -> tuple[Drill, Grade]:
    source = read_answer(file)
    found, guessed = catalogue.of_file(file, source, name)
    chosen = guessed if level is None else catalogue.level_of(found, level)
    return found, grade(found, source, chosen, file=str(file), seed=seed, gate=True)


def note(drill: Drill, graded: Grade) -> None:
    """Add the grade to the record of progress."""
    progress = Progress.read()
    cause = graded.failures[0].cause if graded.failures else ""
    attempt = Attempt(
        drill=drill.name, level=graded.level, letter=graded.letter, when=time.time(), cause=cause,
        shown=drill.name in progress.shown,
    )  # fmt: skip
    replace(progress, attempts=(*progress.attempts, attempt)).write()
