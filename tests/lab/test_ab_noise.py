"""The A/B lab: the rule for the number of requests, false alarms, verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bagu.lab.core import Row
from bagu.lab.eval import ab_noise as lab


def test_half_the_difference_needs_four_times_the_requests() -> None:
    assert lab.requests_needed(1.0, 0.1) == 1570  # 2 * (1.96 + 0.8416)² * 100 = 1569.8
    assert lab.requests_needed(1.0, 0.05) == pytest.approx(4 * 1570, abs=4)
    assert lab.requests_needed(0.5, 0.05) == 1570


def test_the_statistic_is_welchs() -> None:
    pool = torch.tensor([1.0, 2.0, 4.0, 7.0], dtype=torch.float64)
    looks = torch.tensor([5, 12])
    found = lab._statistics(pool, 0.5, 12, looks, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    a, b = (pool[torch.randint(4, (12,), generator=generator)] for _ in range(2))
    for z, n in zip(found.tolist(), (5, 12), strict=True):
        first, second = a[:n], 1.5 * b[:n]
        expected = (second.mean() - first.mean()) / (first.var() / n + second.var() / n).sqrt()
        assert z == pytest.approx(expected.item())


def test_peeking_raises_false_alarms() -> None:
    """Normal latencies: 5 % with one look, about 25 % with twenty (Armitage and others, 1969)."""
    pool = torch.randn(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 10
    fixed, peeking = lab.found_shares(pool, 0.0, 1000, 600, 0)
    error = 300 * (0.05 * 0.95 / 600) ** 0.5  # three standard errors, in percent
    assert abs(fixed - 5) < error and 15 < peeking < 35


def row(difference: float, fixed: float, peeking: float) -> Row:
    return {
        "difference_percent": difference, "requests": 100, "cv_percent": 60.0, "tests": 2000,
        "found_fixed_percent": fixed, "found_peeking_percent": peeking,
    }  # fmt: skip


@pytest.mark.parametrize(
    "alarms, power, kind",
    [
        ((5.0, 25.0), 80.0, "held"),
        ((5.0, 25.0), 40.0, "holds only where"),
        ((5.0, 6.0), 80.0, "holds only where"),
        ((30.0, 35.0), 40.0, "did not hold"),
    ],
)
def test_the_verdict_depends_on_both_parts(alarms: tuple[float, float], power: float, kind: str) -> None:
    found = lab.verdict([row(0.0, *alarms), row(5.0, power, 90.0), row(10.0, power, 90.0)])
    assert found.kind == kind and replace(found, kind="held").sentence_zh
