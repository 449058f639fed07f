"""Functions that are specified in words and composed of verbs, such as double, add 3: a task that a model of a million
parameters learns in minutes, and that running the code decides.

    Write a function line_size(x): first double x, finally add 3.

    def line_size(x):
        x = x * 2
        x = x + 3
        return x

A composition is the ordered verbs, without their constants. `held_out` has some of the lengths that are trained, and
half as many that are longer than any trained one. No stage trains on a held-out composition, not even as a part of a
longer one, or on a held-out name.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple


class Verb(NamedTuple):
    """`words` and `line` have `{n}` where the verb takes a constant, from `constants`."""

    words: str
    line: str
    constants: tuple[int, int] | None = None


NUMBERS, TEXTS, LISTS = "x", "s", "xs"  # the name of the argument says what it is
VERBS: dict[str, tuple[Verb, ...]] = {
    NUMBERS: (
        Verb("double x", "x = x * 2"),
        Verb("halve x", "x = x // 2"),
        Verb("square x", "x = x ** 2"),
        Verb("negate x", "x = -x"),
        Verb("drop the sign", "x = abs(x)"),
        Verb("add {n}", "x = x + {n}", (1, 9)),
        Verb("subtract {n}", "x = x - {n}", (1, 9)),
        Verb("multiply by {n}", "x = x * {n}", (3, 9)),
        Verb("take the rest by {n}", "x = x % {n}", (3, 9)),
        Verb("limit x to {n}", "x = min(x, {n})", (3, 9)),
        Verb("raise x to {n}", "x = max(x, {n})", (3, 9)),
        Verb("count the digits", "x = len(str(x))"),
    ),
    TEXTS: (
        Verb("reverse it", "s = s[::-1]"),
        Verb("write it in upper case", "s = s.upper()"),
        Verb("write it in lower case", "s = s.lower()"),
        Verb("swap the case", "s = s.swapcase()"),
        Verb("strip the spaces", "s = s.strip()"),
        Verb("drop the first letter", "s = s[1:]"),
        Verb("drop the last letter", "s = s[:-1]"),
        Verb("keep {n} letters", "s = s[:{n}]", (2, 5)),
        Verb("repeat it {n} times", "s = s * {n}", (2, 4)),
        Verb("append a dot", 's = s + "."'),
        Verb("join with dashes", 's = "-".join(s)'),
        Verb("replace spaces", 's = s.replace(" ", "_")'),
    ),
    LISTS: (
        Verb("sort the list", "xs = sorted(xs)"),
        Verb("reverse the list", "xs = xs[::-1]"),
        Verb("drop the first item", "xs = xs[1:]"),
        Verb("drop the last item", "xs = xs[:-1]"),
        Verb("keep {n} items", "xs = xs[:{n}]", (2, 5)),
        Verb("remove repeats", "xs = list(dict.fromkeys(xs))"),
        Verb("keep the even ones", "xs = [x for x in xs if x % 2 == 0]"),
        Verb("keep those above {n}", "xs = [x for x in xs if x > {n}]", (1, 5)),
        Verb("double each", "xs = [x * 2 for x in xs]"),
        Verb("add {n} to each", "xs = [x + {n} for x in xs]", (1, 9)),
        Verb("append {n}", "xs = xs + [{n}]", (1, 9)),
        Verb("repeat the list", "xs = xs + xs"),
    ),
}
CALLS: dict[str, tuple[Any, ...]] = {  # the arguments that an answer is run with
    NUMBERS: (0, 7, -5, 12, 38, -140),
    TEXTS: ("Hello World", "  a Bc dEf ", "x", "Zig zag", "mIxEd-Case Words"),
    LISTS: ([3, 1, 2], [], [5, 5, -2, 8, 8, 1], [4, 9, 6, 2, 7, 3, 0], [1]),
}
FIRST = (
    "line", "file", "name", "text", "data", "code", "time", "path", "user", "item", "list", "type", "test", "size",
    "node", "base", "host", "page", "word", "task",
)  # fmt: skip
SECOND = (
    "name", "size", "data", "type", "path", "time", "code", "text", "file", "line", "list", "item", "key", "value",
    "count", "index", "table", "group", "info", "map",
)  # fmt: skip
TRAINED = 3  # the most verbs of a training item
LENGTHS = (2, TRAINED, TRAINED + 1)  # of the held-out items, in turn
ITEMS = 240  # held out
SEED = 20

Composition = tuple[str, tuple[int, ...]]  # the argument's name, and the verbs by their place in VERBS


@dataclass(frozen=True, kw_only=True)
class Composed:
    """One function: its name, the argument's name, and the verbs with their constants."""

    name: str
    argument: str
    verbs: tuple[int, ...]
    constants: tuple[int | None, ...]

    @property
    def composition(self) -> Composition:
        return self.argument, self.verbs

    @property
    def question(self) -> str:
        """A space stands before the name, as after `def`, so that question and answer have the same tokens for it. The
        words before a verb say whether it is the first or the last: a model of two or three layers finds it by them."""
        words = self._filled("words")
        if len(words) > 1:
            words = [f"first {words[0]}", *(f"then {each}" for each in words[1:-1]), f"finally {words[-1]}"]
        return f"Write a function {self.name}({self.argument}): {', '.join(words)}."

    @property
    def answer(self) -> str:
        body = "".join(f"    {line}\n" for line in self._filled("line"))
        return f"def {self.name}({self.argument}):\n{body}    return {self.argument}"

    def _filled(self, field: str) -> list[str]:
        """The words or the lines of the verbs, with their constants."""
        verbs = VERBS[self.argument]
        return [getattr(verbs[v], field).format(n=n) for v, n in zip(self.verbs, self.constants, strict=True)]

    @property
    def calls(self) -> list[list[Any]]:
        """Pairs of an argument and the result."""
        space: dict[str, Any] = {}
        exec(self.answer, space)  # made from VERBS, and not by a model
        return [[value, space[self.name](value)] for value in CALLS[self.argument]]

    @property
    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "answer": self.answer, "calls": self.calls}


def _draw(draw: random.Random, length: int, names: Sequence[str]) -> Composed:
    argument = draw.choice(tuple(VERBS))
    verbs = [_with_constant(draw, argument, v) for v in draw.sample(range(len(VERBS[argument])), length)]
    return Composed(
        name=draw.choice(names),
        argument=argument,
        verbs=tuple(v for v, _ in verbs),
        constants=tuple(n for _, n in verbs),
    )


def _with_constant(draw: random.Random, argument: str, verb: int) -> tuple[int, int | None]:
    limits = VERBS[argument][verb].constants
    return verb, None if limits is None else draw.randint(*limits)


@cache
def _names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names for training, and those that are held out: a fifth of the pairs of words."""
    names = [f"{a}_{b}" for a in FIRST for b in SECOND if a != b]
    random.Random(SEED).shuffle(names)
    held = len(names) // 5
    return tuple(names[held:]), tuple(names[:held])


@cache
def held_out() -> tuple[Composed, ...]:
    """The held-out items, each of another composition; a third have more than TRAINED verbs."""
    draw, found = random.Random(f"held out {SEED}"), dict[Composition, Composed]()
    while len(found) < ITEMS:
        item = _draw(draw, LENGTHS[len(found) % len(LENGTHS)], _names()[1])
        found.setdefault(item.composition, item)
    return tuple(found.values())


@cache
def _forbidden() -> frozenset[Composition]:
    return frozenset(item.composition for item in held_out())


def trains(composition: Composition) -> bool:
    """Whether a stage may train on it: no run of its verbs is held out."""
    argument, verbs = composition
    runs = (verbs[a:b] for a in range(len(verbs)) for b in range(a + 1, len(verbs) + 1))
    return all((argument, run) not in _forbidden() for run in runs)


def training(number: int, lengths: Sequence[int], *, seed: str) -> list[Composed]:
    """Training items of these lengths in turn."""
    draw, found = random.Random(seed), list[Composed]()
    while len(found) < number:
        item = _draw(draw, lengths[len(found) % len(lengths)], _names()[0])
        if trains(item.composition):
            found.append(item)
    return found


def careless(item: Composed) -> Composed:
    """The same function without its last step."""
    return replace(item, verbs=item.verbs[:-1], constants=item.constants[:-1])


def broken(item: Composed, *, seed: str) -> Composed:
    """The same function with one mistake: another order, a verb left out, twice, or another in its place."""
    draw = random.Random(f"{seed} {item.question}")
    verbs = list(zip(item.verbs, item.constants, strict=True))
    at, kind = draw.randrange(len(verbs)), draw.choice(("order", "less", "twice", "other"))
    if kind == "order":
        verbs = [*verbs[1:], verbs[0]]
    elif kind == "less":
        del verbs[at]
    elif kind == "twice":
        verbs.insert(at, verbs[at])
    else:
        others = [v for v in range(len(VERBS[item.argument])) if v not in item.verbs]
        verbs[at] = _with_constant(draw, item.argument, draw.choice(others))
    return replace(item, verbs=tuple(v for v, _ in verbs), constants=tuple(n for _, n in verbs))


def nearest(item: Composed, known: Sequence[Composed]) -> Composed:
    """The one of `known` whose question has the most pairs of words in common with that of `item`."""
    own = _pairs(item)
    return max(known, key=lambda other: len(own & _pairs(other)) / len(own | _pairs(other)))


@cache
def _pairs(item: Composed) -> frozenset[tuple[str, str]]:
    words = item.question.partition("(")[2].split()  # the name does not count
    return frozenset(pairwise(words))
