"""Answers graded by another model, the judge.

The task file has the judge's prompt, a template over the fields of a row and `response`, the answer to grade. The judge
must end its answer with a line `Grade: N`, with N from 0 to the task's `judge_best`; the grade is N / judge_best. Any
other answer gives no grade: the item is marked, counted, and left out of the score, because a default would be wrong.
"""

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from bagu.errors import BaguError
from bagu.eval.task import Item, TaskError, Verdict, Verdicts

GRADE = re.compile(r"grade:\s*(\d+(?:\.\d+)?)", re.IGNORECASE)


class Judge(Protocol):
    """A model that grades answers."""

    @property
    def name(self) -> str: ...

    def ask(self, questions: Sequence[str]) -> list[str]:
        """Its answers, each to a chat of one user message. Raises BaguError if it cannot be reached."""
        ...


def read_grade(text: str, best: float) -> float | None:
    """The grade in the last line of a judge's answer, as a share of `best`; None unless the line is `Grade: N`."""
    lines = [line.strip().strip("*") for line in text.strip().splitlines()]
    found = GRADE.fullmatch(lines[-1]) if lines else None
    if found is None or float(found[1]) > best:
        return None
    return float(found[1]) / best


def judged_by(judge: Judge, question: Callable[[Item, str], str], *, best: float) -> Verdicts:
    """Asks the judge about every answer. `question(item, answer)` is its prompt."""

    def verdicts(items: Sequence[Item], texts: Sequence[Sequence[str]]) -> list[list[Verdict]]:
        asked = [question(item, text) for item, answers in zip(items, texts, strict=True) for text in answers]
        try:
            said = judge.ask(asked)
        except BaguError as error:
            raise TaskError(
                f"the judge {judge.name} did not answer: {error}",
                hint="start it, and run again: the items that are graded stay",
            ) from error
        found = iter([Verdict(grade=read_grade(s, best), text=s) for _, s in zip(asked, said, strict=True)])
        return [[next(found) for _ in answers] for answers in texts]

    return verdicts
