"""Copies of functions under random names, for fine-tuning.

A small model that sees each function under one name learns which body goes with which docstring, and guesses the name
from both. Under a random name, only the question says what to write after `def`, so the model learns to copy it.
"""

import keyword
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from bagu.data.stdlib import Function

RENAMING = 1  # the version of this file, which decides the names
WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
IDENTIFIER = re.compile(r"\w+")
WORDS_PER_NAME = (1, 2, 2, 3)  # drawn uniformly, as are the shapes
SHAPES = ("snake", "snake", "snake", "_snake", "camel", "joined")


def renamed_copies(
    functions: Iterable[Function], copies: int, *, taken: frozenset[str], seed: int
) -> Iterator[Function]:
    """Each function, followed by `copies` copies of it under random names, none of which is in `taken`.

    The names are made from the words of the functions' own names. They are a function of the code, the copy's number
    and `seed`.
    """
    listed = list(functions)
    words = sorted({word.lower() for function in listed for word in WORDS.findall(function.name)})
    for function in listed:
        yield function
        used = taken | {function.name, *IDENTIFIER.findall(function.answer)}  # a copy may not hide another name
        for number in range(copies):
            draw = random.Random(f"{seed}:{number}:{function.id}")
            name = next(name for name in _names(words, draw) if name not in used and not keyword.iskeyword(name))
            yield _renamed(function, name)


def _names(words: Sequence[str], draw: random.Random) -> Iterator[str]:
    """Endless random names. The number of words grows, so that a small list of words has a free name too."""
    for tried in range(10**9):
        chosen = draw.choices(words, k=draw.choice(WORDS_PER_NAME) + tried // 8)
        shape = draw.choice(SHAPES)
        if shape == "camel":
            yield chosen[0] + "".join(word.capitalize() for word in chosen[1:])
        elif shape == "joined":
            yield "".join(chosen)
        else:
            yield ("_" if shape == "_snake" else "") + "_".join(chosen)


def _renamed(function: Function, name: str) -> Function:
    """The function under another name, also where its code calls itself. An attribute of the same name stays."""
    own = re.compile(rf"(?<![.\w]){re.escape(function.name)}\b")
    return replace(function, name=name, answer=own.sub(name, function.answer))
