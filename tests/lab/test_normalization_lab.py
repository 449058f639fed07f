"""The normalisation lab: rank correlations, verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from bagu.lab.core import Row
from bagu.lab.eval import normalization


def test_kendall_counts_pairs() -> None:
    losses = np.array([3.0, 2.0, 1.0])
    scores = np.array([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.1, 0.1, 0.3], [0.2, 0.1, 0.3]])
    assert normalization.kendall(scores, losses) == pytest.approx([1, -1, 2 / 3, 1 / 3])


def scored(steps: int, loss: float, raw: float, pmi: float) -> normalization.Scored:
    def answers(share: float) -> list[float]:
        return [float(i < share * 100) for i in range(100)]

    same = {name: answers(raw) for name in ("raw", "tokens", "characters")}
    correct = {"t": same | {"pmi": answers(pmi)}}
    return normalization.Scored(width=32, parameters=9, steps=steps, loss_nats=loss, correct=correct)


def test_ranks_find_the_normalization_that_follows_the_loss() -> None:
    models = [scored(i, 5.0 - i, 0.9 - 0.2 * i, 0.1 + 0.2 * i) for i in range(4)]
    rows = {row["normalization"]: row for row in normalization.ranks(models, "t", {"t": [str(i) for i in range(100)]})}
    assert (rows["raw"]["tau"], rows["pmi"]["tau"], rows["pmi"]["over_raw"]) == (-1, 1, 2)
    assert rows["pmi"]["over_raw_low"] == 2  # steps of 20 points exceed the noise of 100 items
    assert rows["tokens"]["over_raw_low"] == rows["tokens"]["over_raw_high"] == 0


def rank_row(name: str, low: float, high: float) -> Row:
    taus: Row = {"tau": 0.5, "tau_low": 0.3, "tau_high": 0.7, "over_raw": (low + high) / 2}
    return {
        "part": "rank", "task": "t", "normalization": name, "models": 12, "over_raw_low": low, "over_raw_high": high,
    } | taus  # fmt: skip


def test_normalization_flips() -> None:
    raw, pmi = rank_row("raw", 0, 0), rank_row("pmi", 0.2, 0.4)
    tokens, better, unclear = (
        rank_row("tokens", 0.1, 0.3),
        rank_row("characters", 0.1, 0.3),
        rank_row("tokens", -0.1, 0.3),
    )
    assert normalization.verdict([raw, tokens, better, pmi]).kind == "held"
    assert normalization.verdict([raw, unclear, better, pmi]).kind == "holds only where"
    assert normalization.verdict([raw, unclear, pmi]).kind == "not decided"
    for low, high, word in (
        (0.1, 0.3, "better"),
        (-0.3, -0.1, "worse"),
        (-0.2, 0.05, "no better"),
        (-0.1, 0.3, "not decided"),
    ):
        row = rank_row("tokens", low, high)
        assert normalization.decision(row) == word
        assert f": {word})" in normalization.verdict([raw, row]).sentence_en
    scores: list[Row] = [{"part": "model", "low_percent": low} for low in (20.0, 24.0, 30.0)]
    assert "1 of 3 scores are above chance" in normalization.verdict([raw, tokens, *scores]).sentence_en
