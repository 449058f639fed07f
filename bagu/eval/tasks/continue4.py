"""`continue4`: the real next lines of a held-out module, out of four.

The wrong ones come from elsewhere in the same file and have the same indentation, so neither style nor topic gives the
answer away.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from bagu.eval.task import Item, Task
from bagu.eval.tasks.library import PUBLIC, SEED, held_out_modules

__all__ = ["continue4"]

PROMPT, LINES, PER_FILE = 240, 3, 12  # characters before, lines to continue with, items of a file at most


def continue4() -> Task:
    return Task(
        name="continue4", kind="choice", items=_items, delimiter="\n", normalization="characters",
        limits=f"Local coherence of Python source, over a few lines. Chance is 25 %. {PUBLIC}",
    )  # fmt: skip


def _items() -> Iterator[Item]:
    for document in held_out_modules():
        lines = document.text.split("\n")
        rng = random.Random(f"{SEED}:{document.id}")
        places = [i for i in range(8, len(lines) - LINES) if _usable(lines[i : i + LINES])]
        for at in sorted(rng.sample(places, min(PER_FILE, len(places)))):
            right = "\n".join(lines[at : at + LINES])
            others = [i for i in places if abs(i - at) > LINES and _indent(lines[i]) == _indent(lines[at])]
            wrong = list(
                dict.fromkeys("\n".join(lines[i : i + LINES]) for i in rng.sample(others, min(12, len(others))))
            )
            wrong = [text for text in wrong if text != right][:3]
            if len(wrong) < 3:
                continue
            choices = [right, *wrong]
            rng.shuffle(choices)
            before = "\n".join(lines[:at])[-PROMPT:]
            yield Item(
                id=f"{document.id}:{at + 1}", prompt=before[before.find("\n") + 1 :], choices=tuple(choices),
                answer=choices.index(right), cluster=document.id,
            )  # fmt: skip


def _usable(lines: list[str]) -> bool:
    """Not blank at its start, and not a single symbol."""
    return bool(lines[0].strip()) and 40 <= len("\n".join(lines)) <= 160


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
