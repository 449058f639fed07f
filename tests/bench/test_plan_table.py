"""The planner's serving formulas beside the recorded runs of the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagu.nn.presets import preset
from bagu.parallel.planner.cluster import CLUSTERS
from bagu.parallel.planner.serving import batch_times
from benchmarks.tools.plan_table import compared_runs, render

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "serve" / "nvidia-h200.jsonl"
MODEL, H200 = preset("qwen3_0_6b"), CLUSTERS["h200"]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def test_throughput_and_step_of_the_engine_are_predicted_within_15_percent(rows: list[dict[str, Any]]) -> None:
    """Predicted with no constant from these rows: tokens/s 13 % high, the median step 9 % slow."""
    (run,) = compared_runs(rows)
    assert (run.model, run.gpu, run.requests) == ("qwen3_0_6b", "h200", 256)
    assert abs(run.rate_error) <= 0.15
    assert abs(run.step_error) <= 0.15
    assert f"({100 * run.rate_error:+.1f} %)" in render(rows)


def test_the_latest_run_that_the_planner_models_counts(rows: list[dict[str, Any]]) -> None:
    (run,) = compared_runs(rows)
    fast = [row for row in rows if not row["engine"]["invariant"] and row["streams"] is None]  # a batch of requests
    assert run.measured_s == max(fast, key=lambda row: row["env"]["time"])["seconds"]
    assert compared_runs([row for row in rows if row["engine"]["invariant"]]) == []
    assert compared_runs([{**row, "dtype": "float32"} for row in rows]) == []
    assert render([]) == "No run is recorded yet."


def test_steps_follow_the_requests_that_still_run() -> None:
    """Two requests of 4 and 2 tokens: after their prefills one step of both, then two of one."""
    both = batch_times(MODEL, H200, [1000, 3000], [4, 2])
    long = batch_times(MODEL, H200, [1000], [4])
    assert both.decode_s.shape == (3,)
    assert np.array_equal(both.decode_s[1:], long.decode_s[1:])
    assert both.decode_s[0] > long.decode_s[0]
    assert both.prefill_s > 3 * long.prefill_s
    assert both.total_s == pytest.approx(both.prefill_s + both.decode_s.sum())


def test_a_longer_cache_is_read_at_the_bandwidth_of_the_gpu() -> None:
    """64 x 1,000 more cached tokens: their keys and values, 114,688 bytes each, at 4.8 TB/s at the most."""
    short, long = (batch_times(MODEL, H200, [n] * 64, [2] * 64).step_s for n in (1000, 2000))
    fastest = 64 * 1000 * 114_688 / 4.8e12
    assert fastest < long - short < 1.5 * fastest
