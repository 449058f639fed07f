"""Labs of retrieval: planted numbers for each verdict, and the facts that the small readers learn from."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch

from bagu.lab.core import Row
from bagu.lab.parts import facts
from bagu.lab.retrieve import finetune_or_retrieve, lost_in_the_middle, mean_embedding, rag_or_long
from tests.lab.test_micro_labs import rows_of


def piles(*pairs: tuple[float, float]) -> list[Row]:
    """Right answers with retrieval and with everything, for each size of the pile."""
    columns = "way passages seed right_percent found_percent tokens time_ms"
    found = []
    for pile, (retrieved, everything) in enumerate(pairs, 1):
        shares = {"none": 12.0, "retrieved": retrieved, "all": everything, "right": 99.0}
        found += [(w, pile, s, p, 90.0, 9.0, 1.0) for w, p in shares.items() for s in (1, 2, 3)]
    return rows_of(columns, *found)


def tuned(new: float, left: float) -> list[Row]:
    """Tuning beside a retrieval that answers 90 % and reads 95 %."""
    columns = "way seed steps new_percent reading_percent"
    return rows_of(columns, ("retrieved", 1, 0, 90.0, 95.0), ("tuned", 1, 10, 20.0, 94.0), ("tuned", 1, 300, new, left))


def placed(any_place: float, ends: float) -> list[Row]:
    """Right answers in the middle after both trainings, beside 95 % at the ends."""
    columns, found = "training seed place right_percent", []
    for training, middle in (("any place", any_place), ("ends", ends)):
        for place in range(1, 9):
            found += [(training, s, place, 95.0 if place in (1, 8) else middle + s / 10) for s in (1, 2, 3)]
    return rows_of(columns, *found)


def vectors(*lows: float) -> list[Row]:
    """Mean vectors of three seeds, this much above the words."""
    columns = "ranking seed mrr low high more more_low more_high"
    rows = [("words", None, 0.3, 0.28, 0.32, 0.0, 0.0, 0.0)]
    rows += [(n, 1, 0.1, 0.1, 0.1, -0.2, -0.2, -0.2) for n in ("tokens", "untrained")]
    return rows_of(columns, *rows, *(("MLM", i, 0.3 + x, 0.3, 0.4, x, x, x + 0.01) for i, x in enumerate(lows, 1)))


PLANTED: dict[str, tuple[list[Row], list[Row]]] = {
    "rag_or_long": (piles((98.0, 98.0), (97.0, 60.0)), piles((50.0, 98.0), (40.0, 95.0))),
    "finetune_or_retrieve": (tuned(60.0, 90.0), tuned(99.0, 94.0)),
    "lost_in_the_middle": (placed(60.0, 20.0), placed(94.0, 94.0)),
    "mean_embedding": (vectors(0.02, 0.03, 0.02), vectors(-0.2, -0.1, -0.2)),
}
MIXED: dict[ModuleType, list[Row]] = {
    rag_or_long: piles((80.0, 98.0), (97.0, 60.0)),
    finetune_or_retrieve: tuned(99.0, 30.0),
    lost_in_the_middle: placed(94.0, 20.0),
    mean_embedding: vectors(0.02, -0.1, 0.02),
}
OPEN: dict[ModuleType, list[Row]] = {
    rag_or_long: [row | {"right_percent": 13.0} for row in piles((1.0, 1.0))],
    finetune_or_retrieve: [row | {"reading_percent": 12.0} for row in tuned(99.0, 30.0)],
    lost_in_the_middle: [row | {"right_percent": 12.0} for row in placed(1.0, 1.0)],
    mean_embedding: vectors(-0.005, -0.005, -0.005),
}
NAMED = {lab.__name__.split(".")[-1]: lab for lab in MIXED}


@pytest.mark.parametrize("name", NAMED)
def test_some_parts_hold_and_what_cannot_be_told_stays_open(name: str) -> None:
    lab = NAMED[name]
    assert lab.verdict(MIXED[lab]).kind == "holds only where"
    assert lab.verdict(OPEN[lab]).kind == "not decided"


def test_passages_have_the_values_and_search_finds_them() -> None:
    found, values = facts.passages(12, random.Random(0))
    assert len(values) == facts.KEYS and {len(p) for p in found} == {2 * facts.FACTS}
    index = facts.Index(found)
    hits = [any(key * facts.VALUES + value in found[i] for i in index.best(key, 2)) for key, value in values.items()]
    assert sum(hits) > 0.8 * len(hits)


def test_questions_have_their_answers() -> None:
    ids, targets = facts.texts(torch.Generator().manual_seed(0), 4, rows=3)
    for row, aims in zip(ids.tolist(), targets.tolist(), strict=True):
        for token, aim in zip(row, aims, strict=True):
            if aim != facts.IGNORE:
                fact = (token - facts.ASK) * facts.VALUES + aim - facts.SAY
                assert fact in row


def test_words_rank_their_function_first() -> None:
    assert mean_embedding.gain(mean_embedding.np.array([0.1, 0.9, 0.9]), 1) == 1.0
    assert mean_embedding.gain(mean_embedding.np.array([0.1, 0.9, 0.9]), 2) == 0.5
