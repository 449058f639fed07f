"""Prompts to sample answers for, with the facts that a reward needs to score them.

    {"prompt": "What is 2 + 2?", "answer": 4}                                  a string is a user's message
    {"prompt": [{"role": "system", "content": "…"}, {"role": "user", …}]}      or a chat that ends before the answer

The other columns of a row are the facts of its prompt. From the standard library, prompts ask for a function by its
name and the summary of its docstring. The names of validation are held out: no training prompt asks for one of them,
also if another file defines a function of that name.
"""

import doctest
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from bagu.data.chat import ChatEncoder
from bagu.data.chat_source import conversation
from bagu.data.corpus import Part, TextCorpus
from bagu.data.json_rows import Row
from bagu.data.split import held_ids
from bagu.data.stdlib import Function, documented_functions
from bagu.data.table_corpus import TableCorpus
from bagu.errors import BaguError

COLUMN = "prompt"
ROLES_TO_ANSWER = ("user", "tool")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as tokens. `text`, `facts` and `messages` are for the reward; `id` is unique in its corpus."""

    id: str
    ids: tuple[int, ...]
    text: str
    facts: Mapping[str, Any]
    messages: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt before it is tokenized. `text` is the last message; `place` is the file and line, for errors."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    text: str
    facts: Mapping[str, Any]
    place: str


@dataclass(frozen=True)
class PromptCorpus(TableCorpus):
    """A source of prompts."""

    def questions(self, part: Part) -> list[Question]:
        return self._parts[part]

    def prompts(self, part: Part, encoder: ChatEncoder) -> list[Prompt]:
        """The prompts of a part, each ending where the assistant's answer starts."""
        return [_encoded(question, encoder) for question in self.questions(part)]

    @cached_property
    def _parts(self) -> dict[Part, list[Question]]:
        if self.library is not None:
            return self._of_library(self.library)
        questions = [_question(row, self.config.field or COLUMN) for row in self.source.rows()]
        held = held_ids([q.id for q in questions], fraction=self.selection.validation, seed=self.selection.seed)
        return {
            "train": [q for q in questions if q.id not in held],
            "validation": [q for q in questions if q.id in held],
        }

    def _of_library(self, library: TextCorpus) -> dict[Part, list[Question]]:
        train, held = (
            [function_question(f) for f in documented_functions(library.documents(part), **self.function_limit)]
            for part in ("train", "validation")
        )
        names = {q.facts["name"] for q in held}
        return {"train": [q for q in train if q.facts["name"] not in names], "validation": held}

    def training_texts(self) -> Iterator[str]:
        return (question.text for question in self.questions("train"))


def fitting(prompts: Sequence[Prompt], *, room: int) -> tuple[list[Prompt], int]:
    """The prompts of at most `room` tokens, and the number of longer ones, which are left out."""
    fit = [prompt for prompt in prompts if len(prompt.ids) <= room]
    if not fit:
        shortest = min((len(prompt.ids) for prompt in prompts), default=0)
        found = f"the shortest of {len(prompts)} prompts has {shortest} tokens" if prompts else "there are no prompts"
        hint = "raise data.context, lower the number of new tokens, or give shorter prompts"
        raise BaguError(f"no prompt fits in {room} tokens: {found}", hint=hint)
    return fit, len(prompts) - len(fit)


def function_question(function: Function) -> Question:
    """The question for a function. The facts are its name, arguments, docstring, code, and examples if it has some."""
    facts: dict[str, Any] = {
        "name": function.name,
        "args": list(function.args),
        "docstring": function.docstring,
        "answer": function.answer,
    }
    if examples := _examples(function.docstring):
        facts["doctests"] = examples
    message = {"role": "user", "content": function.question}
    return Question(
        id=function.id,
        messages=(message,),
        text=function.question,
        facts=facts,
        place=f"{function.file}:{function.line}",
    )


def _examples(docstring: str) -> list[dict[str, str]]:
    """The doctest examples of a docstring: source and expected output each."""
    try:
        found = doctest.DocTestParser().get_examples(docstring)
    except ValueError:  # inconsistent indentation
        return []
    return [{"source": example.source, "want": example.want} for example in found]


def _question(row: Row, column: str) -> Question:
    if column not in row.fields:
        raise BaguError(f"{row.place}: no field {column!r}", hint=f"found {row.found}")
    prompt = row.fields[column]
    if isinstance(prompt, list):
        messages = conversation(replace(row, fields={"messages": prompt})).messages
    else:
        messages = ({"role": "user", "content": row.text(column)},)
    text, role = str(messages[-1]["content"]), messages[-1]["role"]
    if role not in ROLES_TO_ANSWER:
        hint = f"end it with a message of {' or '.join(ROLES_TO_ANSWER)}"
        raise BaguError(f"{row.place}: the last message of the prompt is of role {role!r}", hint=hint)
    if not text.strip():
        raise BaguError(f"{row.place}: the prompt is empty", hint="correct or delete that row")
    # a chat stays among the facts, because `text` is only its last message
    facts = {key: value for key, value in row.fields.items() if key != column or isinstance(prompt, list)}
    return Question(id=row.id, messages=messages, text=text, facts=facts, place=row.place)


def _encoded(question: Question, encoder: ChatEncoder) -> Prompt:
    try:
        ids = encoder.prompt(question.messages)
    except BaguError as error:
        error.args = (f"{question.place}: {error}",)
        raise
    return Prompt(id=question.id, ids=tuple(ids), text=question.text, facts=question.facts, messages=question.messages)
