"""The lab of DPO and the reward model: pairs, a real run, verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from bagu.data import DataConfig
from bagu.lab.core import Row
from bagu.lab.parts.library_models import Library, new_model, read_library
from bagu.lab.post_train import dpo_reward_model as lab

CONFIG = DataConfig(context=lab.CONTEXT, rows=lab.ROWS)


def test_pairs_are_a_real_and_a_broken_function_after_the_same_prompt() -> None:
    library = read_library(quick=True)
    found = lab.pairs(library.held, library, CONFIG, 20)
    assert len(found.data.units) == len(found.groups) == len(found.files) <= 20
    assert set(found.groups) <= set(lab.KINDS) and set(found.files) <= {d.id for d in library.held}
    for (first, second), file in zip(found.data.units.tolist(), found.files, strict=True):
        real, worse = found.data.tokens(first), found.data.tokens(second)
        assert real.start == worse.start and real.ids[: real.start] == worse.ids[: worse.start]
        assert real.ids != worse.ids and found.data.is_chosen(first) and not found.data.is_chosen(second)
        assert found.data.store.document_id(first).startswith(file)


def test_batches_keep_the_order_of_the_pairs() -> None:
    library = read_library(quick=True)
    found, model = lab.pairs(library.held, library, CONFIG, 12), new_model(width=32, seed=1, device="cpu")
    with torch.no_grad():
        together = torch.cat([lab.logprob(model, batch) for batch in found.batches(CONFIG)])
        for i in (0, len(found.data.units) - 1):
            alone = replace(found, data=replace(found.data, units=found.data.units[i : i + 1]))
            (batch,) = alone.batches(CONFIG)
            torch.testing.assert_close(lab.logprob(model, batch), together[2 * i : 2 * i + 2])


def test_pairs_of_full_length_fit_in_a_batch() -> None:
    library = read_library(quick=True)
    long = replace(CONFIG, context=max(map(len, token_ids(library))))
    found = lab.pairs(library.held, library, long, 20)
    longest = int(found.data.lengths.argmax())
    many = replace(found, data=replace(found.data, units=found.data.units[[longest] * 9]))
    assert sum(batch.num_sequences for batch in many.batches(long)) == 18


def token_ids(library: Library) -> list[tuple[int, ...]]:
    """The sequences of the first pairs."""
    data = lab.pairs(library.held, library, CONFIG, 20).data
    return [data.tokens(int(i)).ids for i in data.units.ravel()]


def check_rows(rows: Sequence[Row]) -> None:
    """Of a quick run (test_lab_run.py): has a row for all pairs and for each group."""
    assert rows[0]["group"] == "all" and {r["group"] for r in rows[1:]} <= set(lab.KINDS)
    assert sum(int(r["pairs"]) for r in rows[1:]) == rows[0]["pairs"]  # type: ignore[arg-type]
    for r in rows:
        assert 0 <= r["dpo_agrees_percent"] <= 100  # type: ignore[operator]
        assert r["difference_points"] == pytest.approx(
            r["dpo_agrees_percent"] - r["two_reward_models_agree_percent"]  # type: ignore[operator]
        )


def test_a_row_counts_right_ranks_and_agreements() -> None:
    asked = lab.Pairs(data=None, groups=["syntax", "syntax", "missing", "missing"], files=list("abcd"))  # type: ignore[arg-type]
    margins = {
        ("reward", 1): [1.0, 1.0, 1.0, -1.0], ("reward", 2): [1.0, 1.0, -1.0, -1.0],
        ("reward", 3): [1.0, 1.0, 1.0, -1.0], ("dpo", 3): [1.0, -1.0, 1.0, 1.0],
        ("dpo", 1): [1.0, -1.0, 1.0, 1.0], ("dpo", 2): [1.0, -1.0, 1.0, 1.0],
    }  # fmt: skip
    every, syntax = lab.row(margins, asked, "all"), lab.row(margins, asked, "syntax")
    agreements = every["two_reward_models_agree_percent"], every["dpo_agrees_percent"]
    assert agreements == pytest.approx((100 * (3 + 1 / 3) / 4, 100 * (1 + 2 / 3) / 4))  # one of three models differs
    assert (every["reward_accuracy_percent"], every["dpo_accuracy_percent"]) == pytest.approx((100 * 8 / 12, 75))
    assert (syntax["pairs"], syntax["two_reward_models_agree_percent"], syntax["dpo_agrees_percent"]) == (2, 100, 50)


def group_row(group: str, *, low: float, able: bool = True) -> Row:
    return {
        "group": group, "pairs": 200, "reward_accuracy_percent": 70.0, "reward_low_percent": 60.0 if able else 45.0,
        "dpo_accuracy_percent": 68.0, "two_reward_models_agree_percent": 80.0, "dpo_agrees_percent": 78.0,
        "difference_points": -2.0, "difference_low_points": low, "difference_high_points": 1.0,
    }  # fmt: skip


def test_the_verdict_needs_agreement_in_groups_that_are_learned() -> None:
    alike, apart = group_row("syntax", low=-3.0), group_row("missing", low=-20.0)
    assert lab.verdict([alike]).kind == "held"
    assert lab.verdict([apart]).kind == "did not hold"
    both = lab.verdict([alike, apart])
    assert both.kind == "holds only where" and "to 5 points, for: syntax;" in both.sentence_en
    guessed = group_row("changed", low=-1.0, able=False)
    assert lab.verdict([guessed]).kind == "not decided"  # agreement of guesses shows nothing
    assert "1 of 2 groups are at chance" in lab.verdict([alike, guessed]).sentence_en
