"""Held-out modules of the running Python's standard library, the source of the built-in tasks.

Every run on the library holds out these files by its default settings (recipes/run.py: 5 % by a hash of the path,
seed 0), so no model trained by `bagu demo` or `bagu train` has seen them. Other models may have seen them: the library
is public. `bagu eval --training RUN` checks it for your own run.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from bagu.data.document import Document
from bagu.data.split import held_ids, place
from bagu.data.stdlib import DEFINED, StdlibSource, functions, parsed
from bagu.eval.task import Item, Task

HELD_SHARE, SEED = 0.05, 0
PUBLIC = "The library is public: models trained on code of the web have seen these files."

Modules = Callable[[], Sequence[Document]]  # a function, so that building a task reads no files


class Library(NamedTuple):
    """The held-out modules, sorted by path as the library is, and the names of the functions of all other modules."""

    held_out: tuple[Document, ...]
    training_names: frozenset[str]


@cache
def library() -> Library:
    documents = list(StdlibSource().documents())
    held = held_ids([d.id for d in documents], fraction=HELD_SHARE, seed=SEED)
    names = (name for d in documents if d.id not in held for name in DEFINED.findall(d.text))
    return Library(tuple(d for d in documents if d.id in held), frozenset(names))


def held_out_modules() -> tuple[Document, ...]:
    return library().held_out


def functions_with_docstring(modules: Sequence[Document]) -> Iterator[tuple[Document, ast.FunctionDef, list[str]]]:
    """(module, function, the module's lines) of every function with a docstring and a body after it."""
    for document in modules:
        lines = document.text.split("\n")
        for function in functions(parsed(document.text)):
            if ast.get_docstring(function) and len(function.body) > 1:
                yield document, function, lines


def room(max_len: int, most: int, share: float) -> int:
    """Characters of ASCII that take at most `share` of `max_len` tokens with any tokenizer, and no more than `most`."""
    return min(most, int(share * max_len))


def in_fair_order(items: Iterable[Item]) -> list[Item]:
    """Sort by a hash of the ids, so that the first N items (`--limit`) are a fair sample of all files."""
    return sorted(items, key=lambda item: place(item.id, seed=SEED, purpose="order"))


def library_loss() -> Task:
    def items() -> Iterator[Item]:
        for document in held_out_modules():
            yield Item(id=document.id, prompt=document.text)

    return Task(name="library", kind="loss", items=items, limits=f"Bits per byte of Python source alone. {PUBLIC}")
