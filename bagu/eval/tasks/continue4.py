"""`continue4`: choose the real next lines of a held-out module out of four choices.

The wrong choices come from elsewhere in the same file and have the same indentation, so neither style nor topic reveals
the answer.
"""

import random
from collections.abc import Iterator, Sequence

from bagu.data.document import Document
from bagu.eval.task import Item, Task
from bagu.eval.tasks.library import PUBLIC, SEED, Modules, held_out_modules, in_fair_order, room

PROMPT, CHOICE = 240, 160  # characters at most
LINES, PER_FILE = 3, 12  # lines to continue with, items of a file at most


def continue4(max_len: int, modules: Modules = held_out_modules) -> Task:
    prompt, choice = room(max_len, PROMPT, 0.55), room(max_len, CHOICE, 0.4)
    return Task(
        name="continue4",
        kind="choice",
        items=lambda: in_fair_order(_items(modules(), prompt, choice)),
        delimiter="\n",
        normalization="characters",
        limits=f"Local coherence of Python source, over a few lines. Chance is 25 %. {PUBLIC}",
    )


def _items(modules: Sequence[Document], prompt: int, choice: int) -> Iterator[Item]:
    for document in modules:
        lines = document.text.split("\n")
        rng = random.Random(f"{SEED}:{document.id}")
        places = [i for i in range(8, len(lines) - LINES) if _usable(lines[i : i + LINES], choice)]
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
            cut = "\n".join(lines[:at])[-prompt:]
            before = cut[cut.find("\n") + 1 :]  # whole lines
            if not cut.isascii() or not before.strip():
                continue
            yield Item(
                id=f"{document.id}:{at + 1}",
                prompt=before,
                choices=tuple(choices),
                answer=choices.index(right),
                cluster=document.id,
            )


def _usable(lines: list[str], most: int) -> bool:
    """Whether the lines do not start blank, are long enough to be distinct, and are ASCII."""
    text = "\n".join(lines)
    return bool(lines[0].strip()) and 24 <= len(text) <= most and text.isascii()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
