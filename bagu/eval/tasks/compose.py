"""`compose`: write a function that is specified in words, of verbs in an order that no training item has
(bagu/data/composed.py). `compose_long`: of more verbs than any training item has.

An answer is correct if it returns the right value for every argument that it is called with, in the sandbox; without
one, if it is the expected code but for spaces and comments, with a warning. Answers are sampled at temperature 1, from
the model's own distribution, so the score is the share of its samples that are correct.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bagu.data.composed import TRAINED, Composed, held_out
from bagu.data.stdlib import parsed
from bagu.eval.grades import each, first_code, program_grade
from bagu.eval.model import Decoding
from bagu.eval.task import Item, Task
from bagu.machine.sandbox import SandboxUnavailable

COMPOSE, LONG = "compose", "compose_long"
TOKENS = 96


def compose(max_len: int, name: str = COMPOSE) -> Task:
    return Task(
        name=name,
        kind="generation",
        chat=True,
        items=lambda: _items(name),
        metric="pass",
        grade=_grade,
        decoding=Decoding(max_tokens=min(TOKENS, max_len // 2), temperature=1.0),
        limits="Three dozen verbs, known to a model of the demo from training; new are their order and the name.",
    )


def of_length(task: str, items: Sequence[Composed]) -> list[Composed]:
    """The held-out items of `compose` or `compose_long`."""
    return [item for item in items if (len(item.verbs) > TRAINED) == (task == LONG)]


def _items(task: str) -> Iterator[Item]:
    for item in of_length(task, held_out()):
        yield Item(
            id=item.name + "".join(f".{v}" for v in item.verbs),
            facts=item.facts,
            answer=item.answer,
            messages=({"role": "user", "content": item.question},),
        )


def calls_program(text: str, facts: Mapping[str, Any]) -> str:
    """A program that ends without an error if the answer returns the right value for each call."""
    checks = (f"assert {facts['name']}({argument!r}) == {result!r}" for argument, result in facts["calls"])
    return "\n".join((first_code(text), *checks))


def same_code(text: str, expected: str) -> bool:
    """Whether both are the same program, whatever their spaces and comments."""
    code, other = parsed(first_code(text)), parsed(expected)
    return code is not None and other is not None and ast.dump(code) == ast.dump(other)


def _grade(items: Sequence[Item], texts: Sequence[Sequence[str]]) -> list[list[float]]:
    try:
        return program_grade(lambda item, text: calls_program(text, item.facts))(items, texts)
    except SandboxUnavailable:
        warnings.warn(
            "this system permits no isolation of model-written code: `compose` asks for the expected code",
            RuntimeWarning,
            stacklevel=2,
        )
        return each(lambda item, text: float(same_code(text, str(item.answer))))(items, texts)
