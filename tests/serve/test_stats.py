"""The counter of steps behind `EngineStats`."""

from __future__ import annotations

import pytest

from bagu.serve import stats
from bagu.serve.stats import WINDOW_S, StepCounter


def test_a_step_counter_averages_over_the_window_and_keeps_no_older_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody calls `stats` in an offline run of millions of steps, so `add` itself drops the old ones."""
    now = 100.0
    monkeypatch.setattr(stats.time, "perf_counter", lambda: now)
    counter = StepCounter()
    for _ in range(40):
        now += WINDOW_S / 4
        counter.add(now - 0.5, 3, 8)
    assert (counter.steps, counter.tokens, counter.batch_size, counter.last_step_s) == (40, 320, 3, 0.5)
    assert len(counter._recent) == 5
    assert counter.tokens_per_s() == 5 * 8 / WINDOW_S
    now += WINDOW_S + 1
    assert counter.tokens_per_s() == 0


def test_overlapping_steps_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([10.0, 11.0])
    monkeypatch.setattr(stats.time, "perf_counter", lambda: next(ends))
    counter = StepCounter()
    assert counter.add(8.0, 1, 1) == 2.0
    assert counter.add(9.0, 1, 1) == 1.0, "from 10, when the previous step ended"
    assert counter.last_step_s == 2.0
