"""`next_line`: which of four lines follows, for the small models of labs.

The wrong lines are from other modules, with their own indentation. Built-in tasks take them from the same file and with
the same indentation (`continue4`), and a model trained for a minute answers those at chance; this one it does not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from bagu.data import Document
from bagu.eval.task import Item, Task
from bagu.eval.tasks.library import in_fair_order

BEFORE, PER_FILE = 160, 6  # characters before the line, items of a file at most
SHORTEST, LONGEST = 6, 70  # characters of a line, without its indentation


def next_line(modules: Sequence[Document]) -> Task:
    return Task(
        name="next_line", kind="choice", items=lambda: in_fair_order(_items(modules)), delimiter="\n",
        normalization="characters", limits="Indentation and topic of the next line. Chance is 25 %.",
    )  # fmt: skip


def _items(modules: Sequence[Document]) -> Iterator[Item]:
    lines = {module.id: module.text.split("\n") for module in modules}
    places = {name: [i for i in range(8, len(own)) if _usable(own[i])] for name, own in lines.items()}
    names = [name for name, own in places.items() if own]
    for name in names:
        rng = random.Random(f"next_line:{name}")
        others = [other for other in names if other != name]
        for at in sorted(rng.sample(places[name], min(PER_FILE, len(places[name])))):
            right = lines[name][at]
            wrong = {lines[other][rng.choice(places[other])] for other in rng.sample(others, min(6, len(others)))}
            choices = [right, *sorted(wrong - {right})[:3]]
            before = "\n".join(lines[name][:at])[-BEFORE:]
            if len(choices) < 4 or not before.isascii() or not before.strip():
                continue
            rng.shuffle(choices)
            yield Item(
                id=f"{name}:{at + 1}", prompt=before[before.find("\n") + 1 :], choices=tuple(choices),
                answer=choices.index(right), cluster=name,
            )  # fmt: skip


def _usable(line: str) -> bool:
    return line.isascii() and SHORTEST <= len(line.strip()) <= LONGEST
