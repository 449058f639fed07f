"""The cost of a step on a worker: the fit, its error on shapes it has not seen, and its correction."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagu.errors import ArgumentError
from bagu.parallel.unlike.profile import Correction, Step, StepCost, Timed, fit, measure

SHAPES = [Step.of_prompt(n) for n in (1, 16, 64, 256)] + [Step.of_decodes([64] * n) for n in (1, 2, 4, 8)]


def roofline(step: Step, *, bandwidth: float, rate: float) -> float:
    """A worker as the planner sees it: 5 M parameters, whose bytes and FLOPs overlap."""
    tokens = step.prompt + step.decodes
    return 2e-4 + max(10e6 / bandwidth, 10e6 * tokens / rate) + 512 * step.attended / bandwidth


@pytest.mark.parametrize("speed", [1.0, 0.5, 0.05])
def test_the_error_on_unseen_shapes_is_below_the_bar_for_three_kinds_of_workers(speed: float) -> None:
    noise = random.Random(0)

    def seconds(step: Step) -> float:
        return roofline(step, bandwidth=2e10, rate=speed * 5e10)

    cost = fit([Timed(s, seconds(s) * noise.uniform(0.97, 1.03)) for s in SHAPES])
    unseen = [Step.of_prompt(n) for n in (24, 100, 400)] + [Step.of_decodes([200] * n) for n in (3, 6)]
    error = sum(abs(cost.seconds(s) / seconds(s) - 1) for s in unseen) / len(unseen)
    assert error < 0.15 and cost.error is not None and cost.error < 0.25


@settings(max_examples=50, deadline=None)
@given(st.tuples(*[st.floats(1e-7, 1e-2)] * 3))
def test_a_linear_worker_is_found_exactly(parts: tuple[float, float, float]) -> None:
    truth = StepCost(base=parts[0], prompt=parts[1], decode=parts[2], attended=parts[2] / 1000)
    found = fit([Timed(s, truth.seconds(s)) for s in SHAPES])
    step = Step(300, 5, 12_345)
    assert found.seconds(step) == pytest.approx(truth.seconds(step), rel=1e-3)
    assert min(found.base, found.prompt, found.decode, found.attended) >= 0


def test_too_few_shapes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="1 shapes"):
        fit([Timed(Step(1), 1.0)] * 5)


def test_measuring_stops_at_its_budget_but_not_before_three_steps() -> None:
    ran: list[Step] = []

    def run(step: Step) -> float:
        ran.append(step)
        return 1.0 * max(1, step.prompt)

    measure(run, SHAPES, budget_s=0.5)
    assert len(ran) == 3


@given(st.floats(1 / 3, 3))
def test_a_wrong_speed_is_corrected_within_20_measurements(wrong: float) -> None:
    correction = Correction()
    for _ in range(20):
        correction.add(1.0, 1.0)  # the worker was as fast as predicted
    for _ in range(20):
        correction.add(1.0, wrong)
    assert correction.factor == pytest.approx(wrong, rel=0.15)
