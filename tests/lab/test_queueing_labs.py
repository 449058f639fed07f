"""The labs on load: batch_latency and queueing."""

from __future__ import annotations

import numpy as np
import pytest

from bagu.lab.core import Row
from bagu.lab.parts.engine_load import MODEL, serve
from bagu.lab.serve import batch_latency, queueing
from bagu.nn import Transformer, init_weights


def test_requests_are_served_in_a_closed_loop_and_as_they_arrive() -> None:
    model = init_weights(Transformer(MODEL), 0).eval()
    closed = serve(model, [3, 1, 2, 4], slots=2)
    assert (closed.first <= closed.last).all() and (closed.arrival < closed.first).all()
    assert closed.first[1] == closed.last[1]  # one token
    assert 1 <= closed.in_system <= 2 and len(closed.tpot) == 3
    spaced = serve(model, [2, 2, 2], slots=1, arrivals=[0.0, 100.0, 100.0])
    assert (
        spaced.first[1] >= 100.0 and spaced.first[2] > spaced.last[1]
    )  # idle time is skipped, the slot is taken in order
    assert spaced.in_system < 0.1
    for found in (closed, spaced):  # Little's law
        assert found.in_system == pytest.approx(found.rate * (found.last - found.taken).mean())


def closed_rows(rates: dict[int, float], error: float) -> list[Row]:
    return [
        {"load": "closed loop", "batch": batch, "output_tokens_per_s": rate, "tpot_ms": 1e3 * batch / rate,
         "requests_per_s": 1.0, "latency_s": 1.0, "in_system_requests": float(batch),
         "rate_times_latency_requests": batch * (1 + error), "from_arrival_requests": batch * 1.1}
        for batch, rate in rates.items()
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rates", "error", "kind"),
    [
        ({1: 100.0, 2: 195.0, 8: 750.0}, 0.005, "held"),
        ({1: 100.0, 2: 195.0, 8: 300.0}, 0.005, "holds only where"),
        ({1: 100.0, 2: 120.0, 8: 500.0}, 0.005, "did not hold"),
        ({1: 100.0, 2: 195.0, 8: 750.0}, -0.06, "did not hold"),
    ],
)
def test_batch_latency_flips(rates: dict[int, float], error: float, kind: str) -> None:
    rows = closed_rows(rates, error)
    assert batch_latency.verdict(rows).kind == kind
    assert max(map(batch_latency.little_error, rows)) == pytest.approx(abs(error))
    assert batch_latency.doublings(rows)[8] == pytest.approx((rates[8] / rates[2]) ** 0.5)


def load_rows(rise: dict[int, float], wait: float) -> list[Row]:
    return [
        {"slots": slots, "seed": seed, "load": load, "latency_p50_ms": 5.0,
         "latency_p99_ms": 10.0 if load < 0.9 else 10 * rise[slots],
         "mean_wait_ms": wait if slots == 1 else None, "formula_wait_ms": 2.0 if slots == 1 else None}
        for slots in queueing.SLOTS for seed in range(2) for load in (0.2, 0.6, 0.9)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rise", "wait", "kind"),
    [
        ({1: 9.0, 16: 3.0}, 2.2, "held"),
        ({1: 9.0, 16: 1.5}, 2.2, "holds only where"),
        ({1: 9.0, 16: 3.0}, 4.0, "holds only where"),
        ({1: 1.0, 16: 1.0}, 4.0, "did not hold"),
    ],
)
def test_queueing_flips(rise: dict[int, float], wait: float, kind: str) -> None:
    rows = load_rows(rise, wait)
    assert queueing.verdict(rows).kind == kind
    assert queueing.formula_ratio(rows) == pytest.approx(wait / 2)
    assert queueing.bend(rows, 16) == (0.6 if rise[16] > 2 else 0.9)


def test_the_formula_of_the_lab_is_that_of_an_m_g_1_queue() -> None:
    """Exponential service times make it M/M/1, whose mean wait is ρ / (1 - ρ) of the mean service time."""
    draw, n, load = np.random.default_rng(0), 200_000, 0.7
    arrival, service = np.cumsum(draw.exponential(1 / load, n)), draw.exponential(1.0, n)
    last, end = np.zeros(n), 0.0
    for i in range(n):
        end = max(end, arrival[i]) + service[i]
        last[i] = end
    found = queueing.Served(
        arrival=arrival, taken=arrival, first=last, last=last, answers=np.ones(n), in_system=0.0, total=last[-1]
    )
    row = queueing.facts(found, 1)
    assert row["formula_wait_ms"] == pytest.approx(1e3 * load / (1 - load), rel=0.03)
    assert row["mean_wait_ms"] == pytest.approx(1e3 * load / (1 - load), rel=0.05)
