"""The cost of a step in its metrics row."""

import pytest
import torch

from bagu.train.loss import Totals
from bagu.train.meters import Meters
from bagu.train.step import StepResult

RESULT = StepResult(loss=1.0, metrics={}, grad_norm=1.0, lr=0.1, totals=Totals(tokens=100, padding=0), skipped=None)


def test_results_that_come_at_once_have_the_rate_of_the_steps_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of 1 s each, whose results come after 2 s: the second in no time."""
    now = [0.0]
    monkeypatch.setattr("bagu.train.meters.time.perf_counter", lambda: now[0])
    meters = Meters(torch.device("cpu"), flops_per_token=1.0, peak_flops=1000.0)
    meters.start()
    now[0] = 2.0
    assert meters.row(RESULT, over=2)["tokens_per_s"] == 50
    meters.start()
    now[0] += 1e-6
    row = meters.row(RESULT, over=2)
    assert 99 < row["tokens_per_s"] < 100 and 9.9 < row["mfu_percent"] < 10
    assert 99e6 < meters.row(RESULT)["tokens_per_s"] < 101e6  # of this step alone
