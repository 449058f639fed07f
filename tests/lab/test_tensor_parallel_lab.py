"""The lab on tensor parallelism: its verdict follows the numbers, and its bytes are those of the formula."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bagu.lab.core import Row
from bagu.lab.parallel.tensor_parallel import verdict


def rows(*points: tuple[int, int, int]) -> list[Row]:
    """Points of width 10: (tokens, bytes of tensor parallelism, bytes of data parallelism)."""
    return [{"width": 10, "tokens": t, "tensor_bytes": tensor, "data_bytes": data} for t, tensor, data in points]


@pytest.mark.parametrize(
    ("points", "kind"),
    [
        (((20, 1, 2), (40, 3, 2)), "holds only where"),
        (((20, 3, 2), (40, 5, 2)), "held"),
        (((20, 1, 2), (40, 2, 2)), "did not hold"),
    ],
)
def test_the_verdict_follows_the_numbers(points: tuple[tuple[int, int, int], ...], kind: str) -> None:
    assert verdict(rows(*points)).kind == kind


def test_the_verdict_says_where_the_modes_are_equal() -> None:
    sentence = verdict(rows((20, 1, 2), (40, 3, 2))).sentence_en
    assert "more from 4 tokens per unit of width, and less up to 2" in sentence


def check_rows(rows: Sequence[Row]) -> None:
    """Counted bytes are those of the formula. Besides activations, a rank sends the gradients of two norms.
    tests/lab/test_lab_run.py runs the lab."""
    for row in rows:
        norms = 2 * 2 * row["width"] * 4 * 3 // 4  # type: ignore[operator]
        assert row["tensor_bytes"] == row["tensor_formula_bytes"] + norms  # type: ignore[operator]
        assert row["data_bytes"] == 2 * row["layer_parameters"] * 4 * 3 // 4  # type: ignore[operator]
