"""`write`: write a function from its name and the summary of its docstring, asked as in fine-tuning.

An answer is correct if it passes all checks of `function_checks.py`; nothing is run. The names are new: no module
outside the held-out ones defines a function of that name, so neither pretraining nor fine-tuning nor a reward has shown
an answer. Only functions whose real code passes the checks are asked for. Answers are sampled at temperature 1, from
the model's own distribution, so the score is the share of its samples that are correct.
"""

from collections.abc import Iterator

from bagu.data.prompts import function_question
from bagu.data.stdlib import documented_functions
from bagu.eval.function_checks import CHECKS, checks_passed
from bagu.eval.grades import each
from bagu.eval.model import Decoding
from bagu.eval.task import Item, Task
from bagu.eval.tasks.library import PUBLIC, in_fair_order, library, room

QUESTION, TOKENS, SAMPLES = 240, 96, 4


def write(max_len: int) -> Task:
    question, tokens = room(max_len, QUESTION, 0.55), min(TOKENS, int(0.4 * max_len))
    return Task(
        name="write",
        kind="generation",
        chat=True,
        items=lambda: in_fair_order(_items(question)),
        metric="pass",
        grade=each(_grade),
        decoding=Decoding(max_tokens=tokens, temperature=1.0, samples=SAMPLES),
        limits=f"The form of a function, not what it does: read it with the diversity of the answers. {PUBLIC}",
    )


def _items(most: int) -> Iterator[Item]:
    known = library().training_names
    for function in documented_functions(library().held_out):
        question = function_question(function)
        if function.name in known or len(question.text) > most or not question.text.isascii():
            continue
        if checks_passed(function.answer, question.facts) == len(CHECKS):
            yield Item(
                id=function.id,
                messages=question.messages,
                answer=function.answer,
                cluster=function.file,
                facts=question.facts,
            )


def _grade(item: Item, text: str) -> float:
    return float(checks_passed(text, item.facts) == len(CHECKS))
