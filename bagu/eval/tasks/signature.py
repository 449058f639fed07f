"""`signature`: choose which of four bodies belongs to a function's signature and docstring. All are from held-out
modules; the wrong ones are from the same file if it has enough functions."""

import ast
import random
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bagu.data.document import Document
from bagu.eval.task import Item, Task
from bagu.eval.tasks.library import (
    PUBLIC,
    SEED,
    Modules,
    functions_with_docstring,
    held_out_modules,
    in_fair_order,
    room,
)

HEAD, BODY = 240, 160  # characters at most


class Function(NamedTuple):
    file: str
    name: str
    line: int
    head: str  # def and docstring
    body: str


def signature(max_len: int, modules: Modules = held_out_modules) -> Task:
    head, body = room(max_len, HEAD, 0.55), room(max_len, BODY, 0.4)
    return Task(
        name="signature",
        kind="choice",
        items=lambda: in_fair_order(_items(modules(), head, body)),
        delimiter="\n",
        normalization="characters",
        limits=f"Whether names and a docstring raise the likelihood of their own code. Chance is 25 %. {PUBLIC}",
    )


def head_and_body(function: ast.FunctionDef, lines: list[str]) -> tuple[str, str]:
    """The source of a function up to the end of its docstring, and the rest; both dedented."""
    docstring = function.body[0]
    whole = textwrap.dedent("\n".join(lines[function.lineno - 1 : function.end_lineno])).split("\n")
    cut = (docstring.end_lineno or 0) - function.lineno + 1
    return "\n".join(whole[:cut]), "\n".join(whole[cut:]).rstrip()


def _functions(modules: Sequence[Document], most_head: int, most_body: int) -> Iterator[Function]:
    seen = set()
    for document, function, lines in functions_with_docstring(modules):
        head, body = head_and_body(function, lines)
        if len(head) <= most_head and 20 <= len(body) <= most_body and body not in seen and (head + body).isascii():
            seen.add(body)
            yield Function(document.id, function.name, function.lineno, head, body)


def _items(modules: Sequence[Document], head: int, body: int) -> Iterator[Item]:
    every = list(_functions(modules, head, body))
    for function in every:
        rng = random.Random(f"{SEED}:{function.file}:{function.line}")
        near = [f for f in every if f.file == function.file and f is not function]
        far = [f for f in every if f.file != function.file]
        if len(near) + len(far) < 3:
            continue
        wrong = rng.sample(near, 3) if len(near) >= 3 else [*near, *rng.sample(far, 3 - len(near))]
        choices = [function.body, *(f.body for f in wrong)]
        rng.shuffle(choices)
        yield Item(
            id=f"{function.file}:{function.line}:{function.name}",
            prompt=function.head,
            choices=tuple(choices),
            answer=choices.index(function.body),
            cluster=function.file,
        )
