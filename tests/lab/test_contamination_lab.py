"""The contamination lab: groups, copies, what the check finds, verdicts."""

from __future__ import annotations

import random

from bagu.eval.contamination import check_contamination
from bagu.eval.task import Item, Task
from bagu.lab.core import Row
from bagu.lab.eval import contamination


def test_groups_share_no_file() -> None:
    items = [Item(id=f"{f}:{i}", prompt="p", cluster=f"file{f}") for f in range(30) for i in range(5)]
    dealt = contamination.groups(items, most=9)
    files = [{item.cluster for item in group.items} for group in dealt]
    assert sum(map(len, files)) == len(set().union(*files))
    assert [(g.form, g.copies) for g in dealt][:2] == [("control", 0), ("verbatim", 1)]
    assert {len(g.items) for g in dealt} == {9}


def test_the_check_finds_verbatim_copies_and_not_edited_ones() -> None:
    words = [f"word{i}" for i in range(400)]
    items = [
        Item(
            id=str(i), prompt=" ".join(words[40 * i : 40 * i + 30]), answer=0,
            choices=(" ".join(words[40 * i + 30 : 40 * i + 40]), "no"),
        )
        for i in range(10)
    ]  # fmt: skip
    task = Task(name="t", kind="choice", items=lambda: items, limits="")
    for form, found in (("verbatim", 5), ("edited", 0)):
        group = contamination.Group(form=form, copies=3, items=items[:5])
        documents = group.documents(task, ["other", "another"])
        assert len(documents) == len({d.id for d in documents}) == 15
        assert len(check_contamination(items, [d.text for d in documents]).found) == found


def test_an_edit_replaces_every_eighth_word() -> None:
    text = " ".join(f"w{i}" for i in range(24))
    for seed in range(20):
        words = contamination.edited(text, ["x", "y"], random.Random(seed)).split()
        places = [i for i, word in enumerate(words) if word in ("x", "y")]
        assert places == list(range(places[0], 24, 8)) and places[0] < 8
        assert len(words) == 24
    assert contamination.edited("x", ["x", "y"], random.Random(0)) == "y"  # a short text has one edit


def contamination_row(form: str, copies: int, rise: float, p: float, found: float) -> Row:
    return {
        "form": form, "copies": copies, "rise_points": rise, "rise_low_points": rise - 5, "rise_high_points": rise + 5,
        "p_value": p, "found_percent": found, "clean_percent": 30.0,
    }  # fmt: skip


def test_contamination_flips() -> None:
    control = contamination_row("control", 0, 0.0, 0.9, 1.0)
    seen = contamination_row("verbatim", 4, 30.0, 0.001, 100.0)
    hidden = contamination_row("edited", 4, 20.0, 0.001, 0.0)
    harmless = contamination_row("edited", 1, 2.0, 0.4, 0.0)
    assert contamination.verdict([control, seen, harmless]).kind == "held"
    some = contamination.verdict([control, seen, hidden])
    assert some.kind == "holds only where"
    assert "with: verbatim × 4, edited × 4. Of these the 13-gram check finds: verbatim × 4." in some.sentence_en
    assert contamination.verdict([control, hidden]).kind == "did not hold"
    assert contamination.verdict([control, harmless]).kind == "did not hold"
    unspecific = contamination_row("control", 0, 0.0, 0.9, 50.0)
    assert contamination.verdict([unspecific, seen]).kind == "did not hold"
