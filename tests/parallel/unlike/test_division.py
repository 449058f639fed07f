"""Shares by measured time: the division, who computes what, and when shares change."""

from itertools import product

import pytest

from bagu.errors import ArgumentError
from bagu.parallel.unlike.shares import TIMED, WARM_UP, Shares, dealt, divide, slowest


@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (0.9, 3.1, 1.7), (1.0, 100.0, 1.0)])
@pytest.mark.parametrize("number", [3, 4, 7, 12])
def test_no_other_division_is_done_earlier(number: int, seconds: tuple[float, ...]) -> None:
    possible = [c for c in product(range(1, number + 1), repeat=3) if sum(c) == number]
    found = divide(number, seconds)
    assert sum(found) == number and min(found) >= 1
    assert slowest(found, seconds) == min(slowest(c, seconds) for c in possible)


def test_a_step_with_fewer_micro_batches_than_workers_is_refused() -> None:
    with pytest.raises(ArgumentError, match="2 micro-batches, and 3 workers"):
        divide(2, (1.0, 1.0, 1.0))


@pytest.mark.parametrize("counts", [(4, 4, 4), (5, 1, 2), (1, 1, 7), (3,)])
def test_each_micro_batch_has_one_worker(counts: tuple[int, ...]) -> None:
    hands = [dealt(counts, worker) for worker in range(len(counts))]
    assert [len(hand) for hand in hands] == list(counts)
    assert sorted(number for hand in hands for number in hand) == list(range(sum(counts)))


def test_equal_counts_are_dealt_as_without_shares() -> None:
    assert [dealt((3, 3), worker) for worker in range(2)] == [[0, 2, 4], [1, 3, 5]]


def played(shares: Shares, seconds: tuple[float, ...], steps: int, number: int = 16) -> tuple[int, ...]:
    """The counts after some steps of workers that need so many seconds for a micro-batch."""
    for _ in range(steps):
        counts = shares.counts(number)
        shares.record(counts, [count * each for count, each in zip(counts, seconds, strict=True)])
        shares.row(1.1 * slowest(counts, seconds))
    return shares.counts(number)


def test_shares_are_equal_until_the_first_steps_are_timed() -> None:
    shares = Shares(4)
    assert played(shares, (1, 1, 1, 2), WARM_UP + TIMED - 1) == (4, 4, 4, 4)
    assert played(shares, (1, 1, 1, 2), 1) == (5, 5, 4, 2)


def test_a_worker_that_slows_gets_less_and_later_more_again() -> None:
    shares = Shares(4)
    assert played(shares, (1, 1, 1, 1), 20) == (4, 4, 4, 4)
    assert played(shares, (1, 1, 3, 1), TIMED) == (5, 5, 1, 5)
    assert played(shares, (1, 1, 1, 1), TIMED + 1) == (4, 4, 4, 4)


def test_noise_of_equal_workers_changes_nothing() -> None:
    shares = Shares(4)
    for turn in range(40):
        times = tuple(1 + 0.12 * ((turn + worker) % 3) for worker in range(4))
        assert played(shares, times, 1) == (4, 4, 4, 4), turn


def test_a_change_says_its_gain_and_the_next_step_its_prediction() -> None:
    shares, seconds = Shares(4), (1.0, 1.0, 1.0, 2.0)
    played(shares, seconds, WARM_UP + TIMED)
    assert shares.change is not None
    assert shares.change.facts() == {
        "before": "4:4:4:4", "now": "5:5:4:2", "speeds": "1.00:1.00:1.00:0.50", "predicted_gain": 1.6
    }  # fmt: skip
    counts = shares.counts(16)
    shares.record(counts, [count * each for count, each in zip(counts, seconds, strict=True)])
    row = shares.row(5.8)
    assert row["predicted_step_s"] == pytest.approx(5 + 0.8)  # what was not computing before: 0.1 of 8 s
    assert row["shares_idle_percent"] == pytest.approx(100 * (1 - 18 / 20))
