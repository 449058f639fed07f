"""Texts of a drill: hints, task, questions, answer. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from bagu.errors import ArgumentError
from bagu.lab.drill import catalogue
from bagu.lab.drill.core import Text, language
from bagu.lab.drill.progress import Progress


def next_hints(name: str, lang: str | None, *, every: bool = False) -> Iterator[str]:
    """The next hint that was not read, or all three."""
    drill, progress = catalogue.drill(name), Progress.read()
    read = progress.hints.get(name, 0)
    upto = 3 if every else min(read + 1, 3)
    for i in range(0 if every else upto - 1, upto):
        yield f"{i + 1}/3  {drill.hints[i](language(lang))}"
    replace(progress, hints={**progress.hints, name: max(read, upto)}).write()


def described(name: str, level: str | None, lang: str | None, *, answer: bool) -> Iterator[str]:
    """Task and questions; with `answer` the solution, which the record notes."""
    drill, chosen = catalogue.drill(name), language(lang)
    level = catalogue.level_of(drill, level)
    if not answer:
        yield drill.task(chosen)
        yield Text("\nInterviewers ask:", "\n面试官会问：")(chosen)
        for question in drill.questions:
            yield f"- {question.zh if chosen == 'zh' else question.en}\n    {question.command}"
        return
    if level not in drill.solutions:
        raise ArgumentError(
            f"{name} has no short answer at level {level}", hint=f"read bagu/ops/{drill.op or name}/{level}_backend.py"
        )
    progress = Progress.read()
    replace(progress, shown={**progress.shown, name: time.time()}).write()
    yield drill.solutions[level]
