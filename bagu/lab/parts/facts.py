"""Facts in a context, and a small model that reads them: reading comprehension that is learned in a minute.

fact      one token for a key and its value; its text is "red fox 3"
passage   FACTS facts and as many words that say nothing
question  one token for a key; the next token is the value
"""

import random
from collections.abc import Sequence
from sqlite3 import Connection, connect

import torch

from bagu.lab.parts.more_steps import IGNORE, new, right, train_on_draws
from bagu.lab.parts.tiny import tiny
from bagu.nn import Transformer
from bagu.retrieve import postings
from bagu.retrieve.words import runs, terms

COLOURS = ("red", "blue", "green", "black", "white", "brown")
ANIMALS = ("fox", "owl", "bear", "crab", "frog", "hawk")
KEYS, VALUES, NOISE = len(COLOURS) * len(ANIMALS), 8, 8
FACTS = 3  # of a passage
SIZE = KEYS * VALUES + KEYS + VALUES + NOISE
ASK, SAY, DULL = KEYS * VALUES, KEYS * VALUES + KEYS, KEYS * VALUES + KEYS + VALUES  # first tokens of each sort
QUESTIONS = 6  # at the end of a text in training


def name(key: int) -> str:
    return f"{COLOURS[key % len(COLOURS)]} {ANIMALS[key // len(COLOURS)]}"


def passages(count: int, draw: random.Random) -> tuple[list[list[int]], dict[int, int]]:
    """`count` passages as tokens, and the value of each key in them."""
    values = {key: draw.randrange(VALUES) for key in draw.sample(range(KEYS), count * FACTS)}
    keys, found = list(values), []
    for first in range(0, len(keys), FACTS):
        tokens = [key * VALUES + values[key] for key in keys[first : first + FACTS]]
        tokens += [DULL + draw.randrange(NOISE) for _ in range(FACTS)]
        draw.shuffle(tokens)
        found.append(tokens)
    return found, values


def text(passage: Sequence[int]) -> str:
    """What a search reads of a passage."""
    return ". ".join(f"{name(t // VALUES)} {t % VALUES}" for t in passage if t < ASK)


class Index:
    """BM25 over passages."""

    def __init__(self, found: Sequence[Sequence[int]]) -> None:
        self.db: Connection = connect(":memory:")
        self.db.executescript(postings.SCHEMA)
        postings.write_segment(self.db, 0, [runs(text(p)) for p in found])
        self.lexicon = postings.Lexicon.load(self.db)

    def best(self, key: int, count: int) -> list[int]:
        """The numbers of the best passages for the name of a key, the best last: nearest to the question."""
        scores = self.lexicon.score(self.db, terms(name(key)))[0]
        return [id for id, _ in postings.best(scores, count)][::-1]


def texts(generator: torch.Generator, most: int, rows: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of `most` passages or fewer, all of a batch as long, with questions at the end."""
    draw = random.Random(int(torch.randint(1 << 30, (), generator=generator)))
    count, ids, targets = draw.randint(1, most), [], []
    for _ in range(rows):
        found, values = passages(count, draw)
        asked = draw.choices(list(values), k=QUESTIONS)
        ids.append([t for p in found for t in p] + [ASK + key for key in asked])
        targets.append([IGNORE] * (len(ids[-1]) - QUESTIONS) + [SAY + values[key] for key in asked])
    return torch.tensor(ids), torch.tensor(targets)


def reader(*, most: int, steps: int, seed: int, device: str) -> Transformer:
    """A model that has learned to answer from up to `most` passages."""
    config = tiny(SIZE, 64, layers=2, heads=2, ffn=128, max_len=512)
    return train_on_draws(new(config, seed, device), lambda g: texts(g, most), steps=steps, seed=seed, lr=4e-3)


def answered(
    model: Transformer, contexts: Sequence[Sequence[int]], keys: Sequence[int], values: Sequence[int]
) -> list[float]:
    """Whether each question after its context is answered rightly, 1 or 0."""
    found = []
    for context, key, value in zip(contexts, keys, values, strict=True):
        ids = torch.tensor([[*context, ASK + key]], device=model.embedding.weight.device)
        targets = torch.full_like(ids, IGNORE)
        targets[0, -1] = SAY + value
        found.append(float(right(model, ids, targets)[0, -1]))
    return found
