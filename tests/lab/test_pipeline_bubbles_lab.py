"""The lab on pipeline bubbles: its verdict follows the numbers. tests/lab/test_lab_run.py runs it."""

from __future__ import annotations

import pytest

from bagu.lab.core import Row
from bagu.lab.parallel.pipeline_bubbles import expected, verdict


def rows(gpipe: float, plain: float, zero: float) -> list[Row]:
    """Idle shares with 4 micro-batches, where the formula gives 0.2."""
    shares = {"gpipe": gpipe, "1f1b": plain, "zero_bubble": zero}
    return [
        {"schedule": s, "micro_batches": 4, "idle_share": share, "formula_share": None if s == "zero_bubble" else 0.2}
        for s, share in shares.items()
    ]


@pytest.mark.parametrize(
    ("shares", "kind"),
    [((0.25, 0.19, 0.1), "held"), ((0.5, 0.19, 0.1), "holds only where"), ((0.5, 0.6, 0.1), "did not hold")],
)
def test_the_verdict_follows_the_numbers(shares: tuple[float, float, float], kind: str) -> None:
    assert verdict(rows(*shares)).kind == kind


def test_the_verdict_compares_zero_bubble_with_1f1b() -> None:
    assert "1f1b at 1 of 1" in verdict(rows(0.2, 0.2, 0.1)).sentence_en
    assert "1f1b at 0 of 1" in verdict(rows(0.2, 0.2, 0.3)).sentence_en


def test_the_formulas() -> None:
    assert [expected("gpipe", 3), expected("1f1b", 3), expected("interleaved", 2)] == [0.25, 0.25, 0.2]
    assert expected("zero_bubble", 3) is None
