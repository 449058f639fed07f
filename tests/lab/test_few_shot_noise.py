"""The few-shot lab: its task, its examples, the spread of scores, verdicts."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from bagu.eval.task import Item, Task, checked_items
from bagu.lab.core import Row
from bagu.lab.eval import few_shot_noise
from bagu.lab.parts.library_models import new_model, next_line, on_engine, read_library


def test_a_keyword_item_asks_for_the_word_that_follows() -> None:
    library = read_library(quick=True)
    items = checked_items(few_shot_noise.keyword(library))
    texts = {d.id: d.text for d in library.held}
    for item in items:
        assert isinstance(item.answer, int)
        word = item.choices[item.answer]
        assert re.search(re.escape(f"{item.prompt}\n{word}") + r"\b", texts[str(item.cluster)])
        assert [choice.strip() for choice in item.choices] == list(few_shot_noise.WORDS)
    assert len(set(Counter(item.answer for item in items).values())) == 1  # as many of each


def test_a_next_line_is_that_of_the_file_and_the_wrong_ones_are_of_others() -> None:
    library = read_library(quick=True)
    items = checked_items(next_line(library.held))
    texts = {d.id: d.text for d in library.held}
    assert len(items) > 20
    for item in items:
        assert isinstance(item.answer, int) and len(set(item.choices)) == 4
        assert f"{item.prompt}\n{item.choices[item.answer]}\n" in texts[str(item.cluster)] + "\n"
        wrong = [choice for i, choice in enumerate(item.choices) if i != item.answer]
        assert all(
            any(choice in text.split("\n") for id, text in texts.items() if id != item.cluster) for choice in wrong
        )


def test_examples_are_not_asked_and_an_order_is_a_permutation() -> None:
    library = read_library(quick=True)
    model = on_engine(new_model(width=32, seed=1, device="cpu"), library)
    q = few_shot_noise.Questions.make(model, few_shot_noise.keyword(library), "labels", 24)
    assert len(q.asked) == 24
    assert not {item.id for item in q.asked} & {item.id for item in q.pool}
    orders = q.prefixes(4, few_shot_noise.ORDER, 6)
    assert len(set(orders)) == 6
    assert len({tuple(sorted(prefix.split("\n\n"))) for prefix in orders}) == 1
    draws = q.prefixes(4, few_shot_noise.EXAMPLES, 6)
    assert len({tuple(sorted(prefix.split("\n\n"))) for prefix in draws}) == 6
    longest = max(len(model.encode(p + i.prompt + "\n" + c)) for p in draws for i in q.asked for c in i.choices)
    assert longest <= model.max_len


def questions(clusters: int) -> few_shot_noise.Questions:
    items = [Item(id=str(i), prompt="p", choices=("a", "b"), answer=0, cluster=str(i % clusters)) for i in range(80)]
    task = Task(name="t", kind="choice", items=lambda: items, limits="")
    return few_shot_noise.Questions(task=task, choices="labels", asked=items, pool=[])


def test_a_spread_is_that_of_the_scores() -> None:
    low, high = [0.0] * 60 + [1.0] * 20, [0.0] * 20 + [1.0] * 60
    row = few_shot_noise.spread(questions(80), 1, "examples", [low, high], 80)
    assert row["spread_points"] == pytest.approx(1.96 * 50 / 2**0.5)
    assert row["changed_items_percent"] == 50
    assert row["significant_pairs_percent"] == 100
    same = few_shot_noise.spread(questions(80), 1, "examples", [low, low], 80)
    assert (same["spread_points"], same["significant_pairs_percent"]) == (0, 0)
    # A bootstrap of 80 independent items: 1.96 standard errors, widened a little to Student's t.
    assert same["interval_points"] == pytest.approx(196 * (0.25 * 0.75 / 80) ** 0.5, rel=0.1)


def spread_row(task: str, items: int, spread: float, interval: float, score: float = 40.0) -> Row:
    return {
        "part": "spread", "task": task, "choices": "labels", "shots": 4, "moved": "order", "draws": 12, "items": items,
        "score_percent": score, "lowest_percent": 30.0, "highest_percent": 40.0, "spread_points": spread,
        "interval_points": interval, "significant_pairs_percent": 10.0,
    }  # fmt: skip


def test_few_shot_noise_flips() -> None:
    inside, outside = spread_row("a", 200, 2.0, 5.0), spread_row("b", 200, 6.0, 5.0)
    assert few_shot_noise.verdict([inside]).kind == "held"
    assert few_shot_noise.verdict([outside]).kind == "did not hold"
    assert few_shot_noise.verdict([inside, outside]).kind == "holds only where"
    # the largest number of items decides, in any order of the rows
    assert few_shot_noise.verdict([inside, spread_row("a", 50, 20.0, 10.0)]).kind == "held"
    assert "±6.0 points against an interval of ±5.0" in few_shot_noise.verdict([outside]).sentence_en


def test_a_score_at_chance_supports_nothing() -> None:
    able, guess = spread_row("a", 200, 2.0, 5.0), spread_row("b", 200, 0.0, 5.0, score=27.0)
    assert few_shot_noise.verdict([guess]).kind == "not decided"
    both = few_shot_noise.verdict([able, guess])
    assert both.kind == "holds only where"
    assert "1 of 2 cases are at chance" in both.sentence_en
