"""The labs on parallel training and on the cost of invariance: verdicts follow the numbers. tests/lab/test_lab_run.py
runs each of them and calls the `check_` functions with their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from bagu.lab.core import Row
from bagu.lab.numerics import invariance_cost
from bagu.lab.parallel import ring_all_reduce, zero_stages
from bagu.lab.train import gradient_accumulation, recomputation
from bagu.lab.train.recomputation import LiveMemory


def ring_rows(ring: list[float], tree: list[float]) -> list[Row]:
    """Times at growing sizes on two ranks."""
    return [
        {"way": way, "ranks": 2, "size_bytes": 1000 * 10**i, "time_us": t, "most_sent_bytes": 10, "formula_bytes": 10}
        for way, times in (("ring", ring), ("tree", tree))
        for i, t in enumerate(times)
    ]


@pytest.mark.parametrize(
    ("ring", "kind"), [([1.0, 1.0], "held"), ([3.0, 1.0], "holds only where"), ([3.0, 3.0], "did not hold")]
)
def test_ring_flips(ring: list[float], kind: str) -> None:
    assert ring_all_reduce.verdict(ring_rows(ring, [2.0, 2.0])).kind == kind


def check_ring_rows(rows: Sequence[Row]) -> None:
    """Ring and tree send the bytes of their formulas. The run checks the sums."""
    for row in rows:
        assert row["most_sent_bytes"] == row["formula_bytes"], row
    assert {(r["way"], r["ranks"]) for r in rows} == {(w, n) for w in ring_all_reduce.WAYS for n in (2, 4)}


def zero_rows(*sent: tuple[float, float]) -> list[Row]:
    """(bytes of data parallelism, bytes of stage 3) at each number of micro-batches."""
    return [
        {
            "model": "m", "dtype": "fp32", "micro_batches": i + 1, "stage": stage, "parameters": 10, "sent_bytes": n,
            "state_bytes": 9, "state_formula_bytes": 10, "sent_formula_bytes": n,
        }
        for i, pair in enumerate(sent)
        for stage, n in zip((0, 3), pair, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (((100, 150), (100, 155)), "held"),
        (((100, 150), (100, 300)), "holds only where"),
        (((100, 100), (100, 300)), "did not hold"),
    ],
)
def test_zero_flips(sent: tuple[tuple[float, float], ...], kind: str) -> None:
    found = zero_stages.verdict(zero_rows(*sent))
    assert found.kind == kind
    assert "at most 10.0 % for states" in found.sentence_en


def check_zero_rows(rows: Sequence[Row]) -> None:
    """Bytes within 1 %, states within 3 %; without a vocabulary to speak of, stage 3 is close to 1.5 in fp32."""
    for row in rows:
        assert row["sent_bytes"] == pytest.approx(row["sent_formula_bytes"], rel=0.01)
        assert row["state_bytes"] == pytest.approx(row["state_formula_bytes"], rel=0.03)
    found = zero_stages.ratios(rows)
    assert found["mostly blocks", "fp32", 1] == pytest.approx(1.5, rel=0.03)
    assert found["large vocabulary", "fp32", 1] < 1.4 and found["mostly blocks", "bf16", 1] < 1.1


def recompute_rows(time: list[float], memory: float = 0.5) -> list[Row]:
    rows: list[Row] = []
    for layers, block in enumerate(time, 2):
        for way, ms, size in (("none", 1.0, 100.0), ("selective", 1.1, 80.0), ("block", block, 100 * memory)):
            rows.append({"recomputed": way, "layers": layers, "step_ms": ms, "step_peak_bytes": size})
    return rows


@pytest.mark.parametrize(
    ("time", "memory", "kind"),
    [
        ([1.3, 1.4], 0.5, "held"),
        ([1.3, 2.0], 0.5, "holds only where"),
        ([1.0, 2.0], 0.5, "did not hold"),
        ([1.3, 1.3], 1.2, "did not hold"),  # it takes more memory
    ],
)
def test_recomputation_flips(time: list[float], memory: float, kind: str) -> None:
    assert recomputation.verdict(recompute_rows(time, memory)).kind == kind


def check_recomputation_rows(rows: Sequence[Row]) -> None:
    """The less is kept, the less memory a step takes."""
    for layers in (2, 4):
        size = {str(r["recomputed"]): r["step_peak_bytes"] for r in rows if r["layers"] == layers}
        assert size["block"] < size["selective"] < size["none"]  # type: ignore[operator]


def test_live_memory_counts_storages_once_until_they_are_freed() -> None:
    with LiveMemory() as live:
        a = torch.zeros(1000)
        b = a.view(10, 100)
        assert live.bytes == 4000
        c = b + 1
        a.add_(1)
        assert (live.bytes, live.peak) == (8000, 8000)
        del c
        assert (live.bytes, live.peak) == (4000, 8000)


def accumulation_rows(per_micro_batch: float, per_step: float) -> list[Row]:
    return [
        {"normalisation": way, "spread": 4, "micro_batches": 2, "gradient_error": e, "loss_error_nats": e}
        for way, e in zip(gradient_accumulation.WAYS, (per_micro_batch, per_step), strict=True)
    ]


@pytest.mark.parametrize(
    ("errors", "kind"), [((1e-15, 1e-15), "held"), ((0.3, 1e-15), "holds only where"), ((0.3, 0.2), "did not hold")]
)
def test_accumulation_flips(errors: tuple[float, float], kind: str) -> None:
    assert gradient_accumulation.verdict(accumulation_rows(*errors)).kind == kind


def check_accumulation_rows(rows: Sequence[Row]) -> None:
    """Only the mean of means changes the gradient."""
    for row in rows:
        equal = row["gradient_error"] <= gradient_accumulation.EQUAL  # type: ignore[operator]
        assert equal == (row["normalisation"] == "per step" or row["targets_largest_over_smallest"] == 1), row


def invariance_rows(costs: list[float], fast: float = 50.0, invariant: float = 0.0) -> list[Row]:
    return [
        {"part": part, "mode": mode, "rows": 4**i, "changed_percent": changed, "time_us": time}
        for part in ("logprobs", "engine")
        for i, cost in enumerate(costs)
        for mode, changed, time in (("fast", fast, 10.0), ("invariant", invariant, 10 * cost))
    ]


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"costs": [1.1, 1.2]}, "held"),
        ({"costs": [1.1, 2.0]}, "holds only where"),
        ({"costs": [2.0, 2.0]}, "did not hold"),
        ({"costs": [1.1, 1.1], "invariant": 1.0}, "did not hold"),  # the promise is broken
        ({"costs": [1.1, 1.1], "fast": 0.0}, "did not hold"),  # there is nothing to fix
    ],
)
def test_invariance_cost_flips(given: dict[str, Any], kind: str) -> None:
    assert invariance_cost.verdict(invariance_rows(**given)).kind == kind


def check_invariance_rows(rows: Sequence[Row]) -> None:
    """Nothing changes in invariant mode."""
    assert {r["part"] for r in rows} >= {"attention", "logprobs", "engine"}
    assert all(r["changed_percent"] == 0 for r in rows if r["mode"] == "invariant")
