"""`recall`: a needle in a long context. Four assignments are placed in held-out source; the end asks for one of them,
and the choices are the four values, so a model that only knows what such values look like scores 25 %."""

import random
from collections.abc import Iterator

from bagu.eval.task import Item, Task
from bagu.eval.tasks.library import PUBLIC, SEED, held_out_modules

ITEMS = 64
CHARACTERS_PER_TOKEN = 1.6  # fewer than tokenizers reach on code, 3 to 4, so that the context fits the model
NAMES = ("alpha", "river", "copper", "window", "garden", "silver", "market", "planet", "violet", "harbor")


def recall(max_len: int) -> Task:
    """Contexts fill half of `max_len` tokens, a quarter and an eighth of it."""
    sizes = [max(200, int(max_len * CHARACTERS_PER_TOKEN * share)) for share in (0.125, 0.25, 0.5)]
    return Task(
        name="recall", kind="choice", items=lambda: _items(sizes), delimiter=" ",
        limits=f"Copying one of four values over at most {sizes[-1]:,} characters. {PUBLIC}",
    )  # fmt: skip


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
            id=f"{number}:{size}", prompt="\n".join(lines) + f"\nassert {names[asked]}_code ==", choices=tuple(values),
            answer=asked, facts={"characters": size},
        )  # fmt: skip
