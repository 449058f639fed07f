"""The labs of process data: their parts against what is known, and verdicts on planted rows."""

from __future__ import annotations

import numpy as np
import pytest

from bagu.lab.core import Row
from bagu.lab.process import best_row, forward_split, maximize_prediction, quantile_signs, trees_or_gp


def luck_row(percent: float) -> Row:
    return {
        "history_rows": 50,
        "noise_percent": 20.0,
        "luck_percent": percent,
        "error_percent": 1.0,
        "luck_noise_sd": 0.5,
    }


def split_row(random: float, tomorrow: float, walk: float = 0.0) -> Row:
    return {"walk_percent": walk, "random": random, "group": random, "forward": tomorrow, "tomorrow": tomorrow}


def rule_rows(maximum: float, over: float) -> list[Row]:
    return [
        {"plant": "coating", "rule": "maximum", "gain_share": maximum, "over_promise_share": over},
        {"plant": "coating", "rule": "bound", "gain_share": 0.8, "over_promise_share": 0.0},
        {"plant": "coating", "rule": "best row", "gain_share": 0.7},
    ]


def fall_rows(quantile: float) -> list[Row]:
    return [{"loss": "squared loss", "fall_percent": 0.0}, {"loss": "quantile 0.9", "fall_percent": quantile}]


def error_row(rows: int, trees: float, gp: float) -> Row:
    return {"history_rows": rows, "plant": "reactor", "trees_error": trees, "gp_error": gp}


def test_without_noise_the_best_row_has_no_luck() -> None:
    assert best_row.luck("reactor", 50, 0.0, 0) == 0
    assert np.mean([best_row.luck("reactor", 200, 0.4, seed) for seed in range(10)]) > 0.3


def test_a_hidden_state_is_constant_in_a_batch() -> None:
    still, walked = (forward_split.drifting(50, walk, 1).table["yield"].values for walk in (0.0, 0.4))
    steps = np.diff((walked - still).reshape(-1, 5), axis=1)
    assert np.abs(steps).max() < 1e-9 and np.ptp(walked - still) > 1


def test_squared_loss_never_falls_and_a_planted_stump_is_seen() -> None:
    x, y = quantile_signs.sample(150, 3)
    assert quantile_signs.largest_fall(quantile_signs.boost(x, y, None)) == 0
    stumps = [quantile_signs.Stump(0, 0.5, 0.0, 1.0), quantile_signs.Stump(0, 0.7, 0.0, -0.4)]
    assert quantile_signs.largest_fall(stumps) == pytest.approx(0.4)
    assert quantile_signs.largest_fall([quantile_signs.Stump(1, 0.5, 1.0, 0.0)]) == 0


@pytest.mark.parametrize(
    ("gain", "over", "kind"), [(0.9, 0.0, "held"), (0.9, 0.3, "did not hold"), (0.5, 0.0, "did not hold")]
)
def test_a_maximum_must_gain_and_keep_its_promise(gain: float, over: float, kind: str) -> None:
    assert maximize_prediction.verdict(rule_rows(gain, over)).kind == kind


def test_where_trees_win_is_said() -> None:
    found = trees_or_gp.verdict([error_row(50, 2.0, 1.0), error_row(5000, 0.5, 1.0)])
    assert found.kind == "holds only where" and "50: 2.00, 5,000: 0.50" in found.sentence_en
