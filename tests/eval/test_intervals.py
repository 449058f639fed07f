"""Intervals cover the truth as often as they say; a paired test is calibrated; pass@k is unbiased."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from bagu.errors import ArgumentError
from bagu.eval import intervals
from bagu.eval.intervals import as_row, compare, estimate, pass_at_k
from bagu.eval.report import interval_plot
from bagu.eval.words import BITS, PERCENT
from tests.eval.coverage import difference_coverage, ratio_coverage, score_coverage

RUNS = 200  # the standard error of a share of 0.95 is 1.5 %, so the floor below is 0.92 less one and a half of them


@pytest.mark.parametrize("kind", ["5", "20", "unequal"])
@pytest.mark.parametrize("clusters", [3, 8, 20, 50])
def test_intervals_cover_the_truth(clusters: int, kind: str) -> None:
    """The corners of the grid in docs/journal/007, where 1,000 runs each give 0.92 or more."""
    found = {p: score_coverage(RUNS, clusters, kind, p, 0.3) for p in (0.1, 0.5, 0.9)}
    assert min(found.values()) >= 0.9 and sum(found.values()) / len(found) >= 0.92, found


@pytest.mark.parametrize("kind", ["5", "unequal"])
@pytest.mark.parametrize("clusters", [3, 10, 50])
def test_intervals_of_differences_cover_the_truth(clusters: int, kind: str) -> None:
    found = {d: difference_coverage(RUNS // 2, clusters, kind, d, 0.3) for d in (0.0, 0.3)}
    assert min(found.values()) >= 0.9, found


@pytest.mark.parametrize("clusters", [3, 10, 50])
def test_intervals_of_bits_per_byte_cover_the_truth(clusters: int) -> None:
    found = {s: ratio_coverage(RUNS, clusters, 4, s) for s in (0.3, 1.5)}
    assert min(found.values()) >= 0.9, found


def test_single_items_near_all_right_are_covered() -> None:
    assert 0.92 <= score_coverage(1000, 64, "1", 0.95, 0.0) <= 0.98
    assert 0.93 <= score_coverage(1000, 100, "1", 0.5, 0.0) <= 0.97


def test_intervals_of_single_items_do_not_cover_where_they_are_clustered() -> None:
    rng, hits = np.random.default_rng(0), 0
    for _ in range(RUNS):
        difficulty = np.repeat(rng.beta(1.0, 1.0, 40), 5)
        found = estimate((rng.random(200) < difficulty).tolist())
        hits += found.low <= 0.5 <= found.high
    assert hits / RUNS < 0.9


def test_one_or_two_clusters_have_no_interval() -> None:
    for found in (estimate([1.0, 0.0, 1.0], ["a", "a", "b"]), compare([0.0] * 3, [1.0] * 3, ["a", "a", "b"])):
        assert math.isnan(found.low) and math.isnan(found.high) and found.clusters == 2
        assert as_row(found)["low"] is None
    assert "(too few clusters)" in PERCENT.score_and_interval(estimate([1.0, 0.0]))
    assert "(too few clusters)" in BITS.difference(compare([1.0], [2.0], below=[4.0]))
    assert "NaN" not in interval_plot([("a", estimate([1.0, 0.0]))], PERCENT)


@pytest.mark.parametrize("degrees, quantile", [(1, 12.706), (2, 4.303), (2.5, 3.572), (9, 2.262), (60, 2.000)])
def test_quantiles_of_students_t(degrees: float, quantile: float) -> None:
    assert intervals._t_quantile(0.975, degrees) == pytest.approx(quantile, rel=2e-3)


def test_an_interval_of_all_right_is_not_empty() -> None:
    found = estimate([1.0] * 50)
    assert (found.mean, found.high) == (1.0, 1.0) and 0.92 < found.low < 0.94
    assert estimate([0.0] * 50).high == pytest.approx(1 - found.low)


def test_a_comparison_is_paired() -> None:
    """b is right wherever a is, and on 8 items more: the pairs show what two intervals of 200 items would not."""
    a = [1.0] * 100 + [0.0] * 100
    b = [1.0] * 108 + [0.0] * 92
    found = compare(a, b)
    assert found.difference == pytest.approx(0.04) and found.low > 0 and found.p_value < 0.02
    assert estimate(a).high > estimate(b).low  # unpaired, they overlap
    assert compare(a, a).p_value == 1.0


def test_the_paired_test_is_calibrated() -> None:
    """Two equal models: p below 0.05 in about 5 % of the draws."""
    rng = np.random.default_rng(0)
    low = [compare((rng.random(40) < 0.5).tolist(), (rng.random(40) < 0.5).tolist()).p_value < 0.05 for _ in range(400)]
    assert 0.01 <= sum(low) / len(low) <= 0.08


def test_a_difference_of_ratios_is_that_of_the_totals() -> None:
    """Bits and bytes of three documents: the long one decides, as it does in the totals."""
    sizes, a, b = [10.0, 10.0, 1000.0], [10.0, 10.0, 1000.0], [5.0, 5.0, 1100.0]
    found = compare(a, b, below=sizes)
    assert found.difference == pytest.approx(sum(b) / sum(sizes) - sum(a) / sum(sizes)) and found.difference > 0


def test_few_clusters_are_tested_exactly() -> None:
    assert compare([0.0] * 5, [1.0] * 5).p_value == pytest.approx(2 / 32)


def test_a_p_value_does_not_depend_on_the_unit() -> None:
    """Signs whose sums are equal are counted as equal, also if rounding makes them differ."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        whole = rng.integers(-5, 6, 9)
        small, large = ([0.0] * 9, whole.tolist()), ([0.0] * 9, (whole * 1e8 / 7).tolist())
        assert compare(*large).p_value == compare(*small).p_value


@pytest.mark.parametrize("samples, correct, k", [(5, 2, 1), (5, 2, 3), (6, 0, 2), (4, 4, 2), (4, 3, 2)])
def test_pass_at_k_is_the_mean_over_all_choices(samples: int, correct: int, k: int) -> None:
    passed = [i < correct for i in range(samples)]
    choices = [any(chosen) for chosen in itertools.combinations(passed, k)]
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(choices) / len(choices))


def test_bad_input() -> None:
    with pytest.raises(ArgumentError, match="a score of no items"):
        estimate([])
    with pytest.raises(ArgumentError, match="a has 1 items and b has 2"):
        compare([1.0], [1.0, 0.0])
    with pytest.raises(ArgumentError, match="pass@3 of 2 samples"):
        pass_at_k(2, 1, 3)
