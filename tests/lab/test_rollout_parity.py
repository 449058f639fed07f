"""The parity lab: real engines and trainers in every mode, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bagu.lab.core import Row
from bagu.lab.post_train import rollout_parity as lab


def check_rows(found: Sequence[Row]) -> None:
    """Of a quick run (test_lab_run.py): invariant mode has equal bits, and int8 weights have not."""
    rows = {str(r["mode"]): r for r in found}
    assert rows["fp32, invariant"]["max_nats"] == 0.0
    assert rows["int8 weights"]["max_nats"] > 0.0  # type: ignore[operator]
    assert rows["fp32"]["max_nats"] < 1e-3  # type: ignore[operator]  # rounding of two layers, 1e-6 measured
    assert {row["tokens"] for row in rows.values()} == {4 * 8}


def test_shares_are_counted_on_the_ratio() -> None:
    row = lab.measure("x", torch.tensor([0.0, math.log(1.3), math.log(0.75), 1e-7], dtype=torch.float64))
    assert row["outside_0.2_percent"] == 50.0
    assert row["outside_1e-06_percent"] == 50.0
    assert row["max_ratio"] == 1.3


def row_of(mode: str, nats: float) -> Row:
    return lab.measure(mode, torch.tensor([0.0, nats], dtype=torch.float64))


def test_the_verdict_follows_the_clipped_tokens() -> None:
    assert lab.verdict([row_of("fp32", 1e-6), row_of("fp32, invariant", 0.0)]).kind == "held"
    assert lab.verdict([row_of("fp32", 0.5)]).kind == "did not hold"
    both = lab.verdict([row_of("fp32, invariant", 0.0), row_of("int8 weights", 0.5)])
    assert both.kind == "holds only where"
    assert "equal bits for 2 tokens" in both.sentence_en and "50 % of the tokens outside 1 ± 0.2" in both.sentence_en
