"""The forgetting lab: code and prose are separated; verdicts."""

from __future__ import annotations

import pytest

from bagu.data import Document
from bagu.lab.core import Row
from bagu.lab.train import mixing_forgetting as lab

MODULE = '''
def documented(x):
    """Say it."""
    # a comment
    def inner():
        """Say more."""
        return x
    return inner

def bare():
    return 1

def only_words():
    """Nothing else."""
'''


def test_code_and_prose_are_separated() -> None:
    texts = lab.separate([Document(id="m", text=MODULE), Document(id="broken", text="def (:")])
    assert [d.text for d in texts["new"]] == ["Say it.", "Say more.", "Nothing else."]
    code = [d.text for d in texts["old"]]
    # the outer function is left out: the inner one is a document already
    assert code == ["def inner():\n    return x", "def bare():\n    return 1", "def only_words():\n    pass"]


def rows(rises: dict[tuple[float, int], float]) -> list[Row]:
    """By (learning rate, share): forgetting of about this many nats."""
    return [
        {
            "seed": seed, "lr_of_first_percent": rate, "old_text_percent": share,
            "forgetting_nats": rise + 0.01 * (seed - 2), "gain_nats": 1.0 - share / 200,
        }
        for (rate, share), rise in rises.items() for seed in (1, 2, 3)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("at_five", "at_ten", "kind"),
    [(0.05, 0.02, "held"), (0.5, 0.05, "holds only where"), (0.5, 0.3, "did not hold"), (-0.1, -0.2, "held")],
)
def test_the_verdict_follows_the_numbers(at_five: float, at_ten: float, kind: str) -> None:
    made = rows({(100.0, 0): 1.0, (100.0, 5): at_five, (100.0, 10): at_ten, (100.0, 100): -0.1})
    found = lab.verdict(made)
    assert found.kind == kind
    assert f"{max(at_ten, 0):.0%}".replace("%", " % at 10 %") in found.sentence_en


def test_a_learning_rate_that_forgets_nothing_has_nothing_to_stop() -> None:
    strong = {(100.0, 0): 1.0, (100.0, 5): 0.5, (100.0, 10): 0.4, (100.0, 100): 0.0}
    weak = {(25.0, 0): -0.01, (25.0, 5): -0.02, (25.0, 10): -0.02, (25.0, 100): -0.1}
    assert lab.verdict(rows(strong)).kind == "did not hold"
    assert lab.verdict(rows(strong | weak)).kind == "holds only where"


def test_the_cost_is_the_lost_gain_on_new_text() -> None:
    made = rows({(100.0, 0): 1.0, (100.0, 5): 0.5, (100.0, 10): 0.3, (100.0, 100): 0.125})
    sentence = lab.verdict(made).sentence_en
    assert "10 % of old text reduces the gain on new text by 5 %" in sentence
    assert "on old text alone it changes by +0.12" in sentence
