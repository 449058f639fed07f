"""`bagu bench eval`: both sides are timed, and all rounds together are compared with the bar."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagu.bench import evaluation
from bagu.bench.options import BenchSetting, EvalBench


@pytest.mark.slow
def test_a_run_records_both_rates_of_every_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluation.main(EvalBench(items=8, rounds=2), BenchSetting(out=tmp_path, as_json=True)) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["round"], r["items"]) for r in rows] == [(0, 4), (1, 4)]
    for row in rows:
        assert row["share_of_prefill"] == pytest.approx(row["eval_tokens_per_s"] / row["prefill_tokens_per_s"])
        assert row["distinct_tokens"] > 4 * row["prefill_tokens"] > 0  # one text for four items, each with four choices


def test_the_bar_is_compared_with_all_rounds_together() -> None:
    def round_of(tokens: int, seconds: float) -> dict[str, float]:
        return {
            "items": 5000, "distinct_tokens": tokens, "eval_s": seconds, "prefill_tokens": 1000, "prefill_s": 1.0,
        }  # fmt: skip

    slow, fast = round_of(1000, 2.0), round_of(9000, 9.0)
    assert evaluation.bar_words([slow, fast]) == "10,000 items: 90.9 % of prefill; the bar of 80 % is met."
    assert evaluation.bar_words([slow]) == "5,000 items: 50.0 % of prefill; the bar of 80 % is not met."
