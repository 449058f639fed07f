"""`recall`: a needle in a long context. Four assignments are placed in held-out source; the end asks for one of them,
and the choices are the four values, so a model that only knows what such values look like scores 25 %.

`recall_1k` to `recall_64k`: the same over one length each, with a free answer, so that guessing scores 0. The needles
of the items are at all distances from the question, evenly; `facts` has the distance in characters.
"""

import random
from collections.abc import Callable, Iterator, Sequence

from bagu.eval.model import Decoding
from bagu.eval.task import Item, Task, TaskError
from bagu.eval.tasks.library import PUBLIC, SEED, held_out_modules

ITEMS = 64
FREE_ITEMS = 200
LENGTHS = {f"recall_{n}k": 1024 * n for n in (1, 2, 4, 8, 16, 32, 64)}  # tokens
ANSWER_TOKENS = 12
CHARACTERS_PER_TOKEN = 1.6  # fewer than tokenizers reach on code, 3 to 4, so that the context fits the model
NAMES = ("alpha", "river", "copper", "window", "garden", "silver", "market", "planet", "violet", "harbor")


def recall(max_len: int) -> Task:
    """Contexts fill half of `max_len` tokens, a quarter and an eighth of it."""
    sizes = [max(200, int(max_len * CHARACTERS_PER_TOKEN * share)) for share in (0.125, 0.25, 0.5)]
    return Task(
        name="recall",
        kind="choice",
        items=lambda: _items(sizes),
        delimiter=" ",
        limits=f"Copying one of four values over at most {sizes[-1]:,} characters. {PUBLIC}",
    )


def _items(sizes: list[int]) -> Iterator[Item]:
    text = "\n".join(document.text for document in held_out_modules())
    for number in range(ITEMS):
        rng = random.Random(f"{SEED}:recall:{number}")
        size = sizes[number % len(sizes)]
        start = rng.randrange(max(1, len(text) - size))
        lines = text[start : start + size].split("\n")[1:-1]
        names, values = rng.sample(NAMES, 4), [str(v) for v in rng.sample(range(1000, 10_000), 4)]
        for name, value in zip(names, values, strict=True):
            lines.insert(rng.randrange(len(lines) + 1), f"{name}_code = {value}")
        asked = rng.randrange(4)
        yield Item(
            id=f"{number}:{size}",
            prompt="\n".join(lines) + f"\nassert {names[asked]}_code ==",
            choices=tuple(values),
            answer=asked,
            facts={"characters": size},
        )


def recall_free(name: str) -> Callable[[int], Task]:
    """The task of one length, `LENGTHS[name]` tokens, as a function of the model's longest sequence."""
    length = LENGTHS[name]

    def make(max_len: int) -> Task:
        if max_len < length:
            raise TaskError(
                f"task {name} needs a model of {length:,} positions, and this one has {max_len:,}",
                hint=f"use {['recall', *(n for n, least in LENGTHS.items() if least <= max_len)][-1]}",
            )
        size = int((length - ANSWER_TOKENS) * CHARACTERS_PER_TOKEN)
        return Task(
            name=name,
            kind="generation",
            items=lambda: free_items(name, size),
            metric="exact",
            grade=_grade,
            decoding=Decoding(max_tokens=ANSWER_TOKENS, stop=("\n",)),
            judged="the first word is the value",
            limits=f"Copying one of four values over {size:,} characters, fewer than {length:,} tokens. {PUBLIC}",
        )

    return make


def free_items(name: str, size: int) -> Iterator[Item]:
    """The items of a task with `size` characters before the question."""
    text = "\n".join(document.text for document in held_out_modules())
    text *= -(-2 * size // len(text))
    for number in range(FREE_ITEMS):
        rng = random.Random(f"{SEED}:{name}:{number}")
        start = rng.randrange(len(text) - size)
        lines = text[start : start + size].split("\n")[1:-1]
        names, values = rng.sample(NAMES, 4), [str(v) for v in rng.sample(range(1000, 10_000), 4)]
        for other, value in zip(names[1:], values[1:], strict=True):
            lines.insert(rng.randrange(len(lines) + 1), f"{other}_code = {value}")
        at = round((number + rng.random()) / FREE_ITEMS * len(lines))
        lines.insert(at, f"{names[0]}_code = {values[0]}")
        distance = sum(len(line) + 1 for line in lines[at:])
        yield Item(
            id=f"{number}:{distance}",
            prompt="\n".join(lines) + f"\nassert {names[0]}_code ==",
            answer=values[0],
            facts={"characters": size, "distance": distance},
        )


def _grade(items: Sequence[Item], texts: Sequence[Sequence[str]]) -> list[list[float]]:
    return [[float(t.split()[:1] == [item.answer]) for t in own] for item, own in zip(items, texts, strict=True)]
