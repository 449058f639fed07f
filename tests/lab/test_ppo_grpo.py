"""The lab of PPO and GRPO: real runs, and verdicts from paired seeds."""

from __future__ import annotations

from collections.abc import Sequence

from bagu.lab.core import Row
from bagu.lab.post_train import ppo_grpo as lab


def check_rows(rows: Sequence[Row]) -> None:
    """Of a quick run (test_lab_run.py): has a row for each rollout and the critic is counted."""
    assert len(rows) == 3 * 2 * 2 * 2
    parameters = {r["algorithm"]: r["parameters"] for r in rows}
    assert parameters["PPO"] > 1.9 * parameters["GRPO"]  # type: ignore[operator]
    assert all(0 <= r["share"] <= 1 for r in rows)  # type: ignore[operator]  # the offsets are not in it


def rows_of(task: str, ppo: float, grpo: float, scatter: float) -> list[Row]:
    return [
        {
            "task": task, "algorithm": name, "rate": rate, "seed": seed, "answers": 0, "parameters": 2 if i == 0 else 1,
            "share": (share if rate == 0.01 else 0.0) + (scatter * seed if i == 0 else 0.0),
        }
        for i, (name, share) in enumerate((("PPO", ppo), ("GRPO", grpo)))
        for rate in (0.003, 0.01)
        for seed in (-1, 0, 1)
    ]  # fmt: skip


def test_the_verdict_needs_a_difference_above_its_interval_at_the_best_rates() -> None:
    clear, unclear = rows_of("bandit", 0.8, 0.6, 0.01), rows_of("sequence", 0.8, 0.6, 0.5)
    assert lab.learned(clear, "bandit", "PPO")[0] == 0.01
    assert lab.verdict(clear).kind == "held"
    assert lab.verdict(unclear).kind == "not decided"
    both = lab.verdict(clear + unclear)
    assert both.kind == "holds only where"
    assert "bandit: PPO +0.200 ± 0.025" in both.sentence_en and "2.0 times the parameters" in both.sentence_en
