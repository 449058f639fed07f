"""Intervals cover the truth as often as they say; a paired test is calibrated; pass@k is unbiased."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bagu.errors import ArgumentError
from bagu.eval import intervals
from bagu.eval.intervals import compare, estimate, pass_at_k

RUNS = 500  # the share that covers has a standard error of 1 %


def coverage(draw: object, truth: float) -> float:
    hits = 0
    for i in range(RUNS):
        values, clusters = draw(np.random.default_rng(i))  # type: ignore[operator]
        found = estimate(values, clusters, seed=i)
        hits += found.low <= truth <= found.high
    return hits / RUNS


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "RESAMPLES", 1000)


@pytest.mark.parametrize("items, rate", [(100, 0.5), (200, 0.25), (150, 0.7)])
def test_intervals_of_accuracies_cover_the_truth(items: int, rate: float) -> None:
    assert 0.93 <= coverage(lambda rng: ((rng.random(items) < rate).tolist(), None), rate) <= 0.97


def test_intervals_of_clustered_items_cover_the_truth_and_those_of_single_items_do_not() -> None:
    """40 passages with 5 questions each; a passage is easy or hard for all of its questions."""

    def draw(rng: np.random.Generator) -> tuple[list[float], list[int]]:
        difficulty = np.repeat(rng.beta(1.0, 1.0, 40), 5)
        return (rng.random(200) < difficulty).tolist(), np.repeat(np.arange(40), 5).tolist()

    assert 0.93 <= coverage(draw, 0.5) <= 0.97
    assert coverage(lambda rng: (draw(rng)[0], None), 0.5) < 0.9


def test_an_interval_of_all_right_is_not_empty() -> None:
    found = estimate([1.0] * 50)
    assert (found.mean, found.high) == (1.0, 1.0) and 0.93 < found.low < 0.95
    assert estimate([0.0] * 50).high == pytest.approx(1 - found.low)
    assert estimate([0.0] * 50, ["one cluster"] * 50).high == pytest.approx(0.95)


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
