"""Made-up facts in short passages: text that no model has seen, with questions that have one checkable answer.

A passage is about one name and has two facts, each a sentence: "Tarvo has depth 482." The names of `held_out` are
in no passage of `training`, and values are drawn anew, so that an answer can only be read, never known.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

FIRST = tuple(map("".join, product("BDFGKLMNPRTV", "aeio", "lnr")))
LAST = tuple(map("".join, product("bdfgklmnprtv", "aeio")))
ATTRIBUTES = ("depth", "price", "weight", "height", "speed", "length", "age", "rank")
PLACES = ("north", "south", "east", "west", "coast", "hills", "lakes", "woods")  # names of files
HELD = 320  # names, and passages, that training does not have
SEED = 11


@dataclass(frozen=True)
class Fact:
    name: str
    attribute: str
    value: int

    @property
    def sentence(self) -> str:
        return f"{self.name} has {self.attribute} {self.value}"

    @property
    def question(self) -> str:
        return f"What is the {self.attribute} of {self.name}?"


@dataclass(frozen=True)
class Entry:
    """A passage: what it says, and the file that it stands in."""

    file: str
    facts: tuple[Fact, ...]

    @property
    def text(self) -> str:
        return " ".join(f"{fact.sentence}." for fact in self.facts)


def held_out() -> list[Entry]:
    """The passages of the task, in the order of their files."""
    draw = random.Random(SEED)
    each = HELD // len(PLACES)
    return [_entry(name, f"{PLACES[i // each]}.txt", draw) for i, name in enumerate(_names()[:HELD])]


def training(seed: int, most: int = 4) -> Iterator[tuple[list[Entry], list[tuple[int, Fact]]]]:
    """Endless groups of one to `most` passages, with the facts to ask for: for each the place of its passage, from 0.
    The passages of a group share attributes, as those do that a search finds for one question."""
    draw, names = random.Random(seed), _names()[HELD:]
    while True:
        chosen = draw.sample(names, draw.randint(1, most))
        shared = draw.choice(ATTRIBUTES)
        folder = draw.choice(("", "docs/", "facts/docs/", f"{draw.choice(FIRST).lower()}/{draw.choice(LAST)}/"))
        entries = [_entry(name, f"{folder}{draw.choice(PLACES)}.txt", draw, shared) for name in chosen]
        asked = [(place, fact) for place, entry in enumerate(entries) for fact in entry.facts]
        yield entries, draw.sample(asked, len(asked))


@cache
def _names() -> Sequence[str]:
    return random.Random(SEED).sample(list(map("".join, product(FIRST, LAST))), len(FIRST) * len(LAST))


def _entry(name: str, file: str, draw: random.Random, shared: str | None = None) -> Entry:
    attributes = draw.sample(ATTRIBUTES, 2)
    if shared is not None and shared not in attributes and draw.random() < 0.7:
        attributes[draw.randrange(2)] = shared
    return Entry(file, tuple(Fact(name, attribute, draw.randrange(100, 1000)) for attribute in attributes))
