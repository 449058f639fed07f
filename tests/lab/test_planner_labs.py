"""The planner's labs: verdicts follow the numbers, and small runs are sound."""

from __future__ import annotations

import torch

from bagu.lab.core import Row, number
from bagu.lab.parallel import layout_scaling, what_limits
from bagu.lab.train import memory_by_formula
from bagu.nn.presets import preset


def scaling(*pairs: tuple[float | None, float | None]) -> list[Row]:
    return [
        {"model": "m", "gpus": 8 * 2**i, "fsdp_step_s": fsdp, "three_d_step_s": three}
        for i, (fsdp, three) in enumerate(pairs)
    ]


def test_the_crossing_is_where_3d_stays_faster() -> None:
    rows = scaling((8.0, 9.0), (4.0, 3.5), (2.0, 2.1), (1.2, 1.0), (None, 0.6))
    assert layout_scaling.crossing(rows, "m") == 64  # faster at 16 too, but not at 32
    assert layout_scaling.crossing(scaling((8.0, 9.0)), "m") is None
    assert layout_scaling.verdict(rows).kind == "held"
    assert "from 64 GPUs" in layout_scaling.verdict(rows).sentence_en
    assert layout_scaling.verdict(scaling((8.0, 7.0), (4.0, 3.0))).kind == "did not hold"


def test_few_gpus_fit_no_large_model() -> None:
    assert layout_scaling.measured("llama3-405b", 8) is None
    assert what_limits.measured("llama3-405b", 8) is None


def test_shares_are_a_whole() -> None:
    row = what_limits.measured("llama3-8b", 64)
    assert row is not None
    assert abs(sum(number(row, what_limits.SHARE(group)) for group in what_limits.GROUPS) - 100) < 1e-9


def shares(compute: float) -> list[Row]:
    """On few GPUs, and on many, where computation has this share."""
    first: Row = {"model": "m", "gpus": 8, "compute_percent": 95, "memory_percent": 2, "links_percent": 2}
    last: Row = {"model": "m", "gpus": 64, "compute_percent": compute, "memory_percent": 0}
    return [first | {"idle_percent": 1}, last | {"links_percent": 98 - compute, "idle_percent": 2}]


def test_memory_of_a_real_forward_is_near_the_formula() -> None:
    row = memory_by_formula.measured("llama", preset("cpu_6m"), 1, torch.device("cpu"))
    assert abs(memory_by_formula.error(row, "planner_bytes")) <= memory_by_formula.GOOD
    assert memory_by_formula.verdict([row]).kind == "held"
    assert (
        memory_by_formula.verdict([row | {"planner_bytes": 2 * number(row, "measured_bytes")}]).kind == "did not hold"
    )
