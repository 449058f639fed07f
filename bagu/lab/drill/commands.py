"""What `bagu drill check` and the commands that run an answer do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bagu.errors import ArgumentError
from bagu.lab.drill import bugs, catalogue, words
from bagu.lab.drill.core import Drill, in_triton, language
from bagu.lab.drill.grade import Grade, grade, read_answer
from bagu.lab.drill.progress import Attempt, Progress, digest_of


def check_file(
    file: Path, name: str | None, level: str | None, *, seed: int | None = None, lang: str | None = None
) -> int:
    """Grade a file, print the verdict, and note it. Returns 0 if it is right."""
    found, graded = graded_file(file, name, level, seed=seed)
    for line in words.verdict(graded, language(lang)):
        print(line)
    note(found, graded, read_answer(file))
    return 0 if graded.right else 1


def graded_file(
    file: Path, name: str | None, level: str | None, *, seed: int | None = None, gate: bool = True
) -> tuple[Drill, Grade]:
    source = read_answer(file)
    found, guessed = catalogue.of_file(file, source, name)
    chosen = guessed if level is None else catalogue.level_of(found, level)
    graded = grade(found, source, chosen, file=str(file), seed=seed, gate=gate)
    lines = bugs.changed_lines(found, source)
    if graded.right and lines is not None:
        few = lines <= bugs.MOST_LINES
        said = (
            f"the bug is mended in {lines} lines" if few else f"{lines} lines differ; mend the bug in {bugs.MOST_LINES}"
        )
        graded = replace(graded, notes=[*graded.notes, said], letter=graded.letter if few else "E")
    return found, graded


def note(drill: Drill, graded: Grade, source: str) -> None:
    """Add the grade to the record of progress."""
    progress = Progress.read()
    cause = graded.failures[0].cause if graded.failures else ""
    attempt = Attempt(
        drill=drill.name,
        level=graded.level,
        letter=graded.letter,
        when=time.time(),
        cause=cause,
        shown=drill.name in progress.shown,
        digest=digest_of(source),
    )
    replace(progress, attempts=(*progress.attempts, attempt)).write()


def passed_before(file: Path, name: str | None) -> Iterator[str]:
    """Grade a file in the sandbox before it runs with the caller's rights, unless a check found this very file right.
    Raises if it is wrong."""
    source = read_answer(file)
    if Progress.read().passed(catalogue.of_file(file, source, name)[0].name, source):
        yield f"{file} has passed its check and is unchanged; it runs with your rights now"
        return
    yield f"the trials of {file} first, in the sandbox; then it runs with your rights:"
    found, graded = graded_file(file, name, None, gate=False)
    if not graded.right:
        first = graded.failures[0]
        raise ArgumentError(f"{file} is not right yet: {first.message}", hint="bagu drill check FILE")
    note(found, graded, source)
    yield f"  {graded.passed} of {graded.passed} are right"


def time_lines(file: Path, name: str | None) -> Iterator[str]:
    """The lines of `bagu drill time`: the answer must be right first."""
    import torch

    source = read_answer(file)
    found, level = catalogue.of_file(file, source, name)
    if not in_triton(level):
        raise ArgumentError(f"{file} is no Triton kernel", hint="speed is part of the levels in Triton alone")
    yield from passed_before(file, name)
    if not torch.cuda.is_available():
        from bagu.lab.drill.static import compile_answer

        faults, notes = compile_answer(found, level, source, str(file))
        yield from (*notes, *faults)
        yield "no GPU here: the compile gate stands for speed; the grade is " + ("C" if faults else "B")
        return
    from bagu.lab.drill.speed import letter, time_answer

    rows = []
    for row in time_answer(found, file):
        rows.append(row)
        yield str(row)
    yield f"{len(rows)} shapes: {letter(rows)}"


def try_lines(file: Path, name: str | None, *, steps: int) -> Iterator[str]:
    """The lines of `bagu drill try`: the answer must be right first."""
    from bagu.lab.drill.swap import check_place, run_both

    found, level = catalogue.of_file(file, read_answer(file), name)
    check_place(found, level)
    yield from passed_before(file, name)
    yield from run_both(found, file, steps=steps)
