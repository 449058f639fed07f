"""The cost of a step on a worker: the fit, its error on shapes it has not seen, and its correction."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagu.errors import ArgumentError
from bagu.parallel.unlike.profile import Correction, Step, StepCost, Timed, Took, fit, measure

DECODES = ((1, 16), (1, 384), (4, 96), (8, 32), (16, 48))  # sequences, and tokens before each
SHAPES = [Step.of_prompt(n) for n in (8, 32, 128, 512)] + [Step.of_decodes([c] * n) for n, c in DECODES]


def roofline(step: Step, *, bandwidth: float, rate: float) -> float:
    """A worker as the planner sees it: 5 M parameters, whose bytes and FLOPs overlap."""
    tokens = step.prompt + step.decodes
    positions = 512 * (step.attended + 2 * step.read) / bandwidth
    return (5e-4 if step.prompt else 2e-4) + max(10e6 / bandwidth, 10e6 * tokens / rate) + positions


@pytest.mark.parametrize("speed", [1.0, 0.5, 0.05])
def test_the_error_on_unseen_shapes_is_below_the_bar_for_three_kinds_of_workers(speed: float) -> None:
    noise = random.Random(0)

    def seconds(step: Step) -> float:
        return roofline(step, bandwidth=2e10, rate=speed * 5e10)

    cost = fit([Timed(s, seconds(s) * noise.uniform(0.97, 1.03)) for s in SHAPES])
    unseen = [Step.of_prompt(n) for n in (24, 100, 400)] + [Step.of_decodes([200] * n) for n in (3, 6)]
    error = sum(abs(cost.seconds(s) / seconds(s) - 1) for s in unseen) / len(unseen)
    assert error < 0.15 and cost.error is not None and cost.error < 0.25


@settings(max_examples=50)
@given(st.tuples(*[st.floats(1e-7, 1e-2)] * 4))
def test_a_linear_worker_is_found_exactly(parts: tuple[float, ...]) -> None:
    base, prompt, decode, any_prompt = parts
    truth = StepCost(
        base=base, any_prompt=any_prompt, prompt=prompt, attended=prompt / 1000, decode=decode, read=decode / 300
    )
    found = fit([Timed(s, truth.seconds(s)) for s in SHAPES])
    step = Step(300, 5, 12_345, 4_321)
    assert found.seconds(step) == pytest.approx(truth.seconds(step), rel=1e-3)
    assert min(found.base, found.any_prompt, found.prompt, found.attended, found.decode, found.read) >= 0


def test_too_few_shapes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="1 shapes"):
        fit([Timed(Step(1), 1.0)] * 5)


def test_measuring_stops_at_its_budget_but_not_before_three_steps() -> None:
    ran: list[Step] = []

    def run(step: Step) -> Took:
        ran.append(step)
        time.sleep(0.01)
        return Took(1.0, 1.0)

    measure(run, SHAPES, budget_s=0.0)
    assert len(ran) == 3
    ran.clear()
    measure(run, SHAPES, budget_s=60.0, rounds=2)
    assert ran == 2 * SHAPES


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_bursts_of_other_processes_and_a_share_of_the_core(share: float) -> None:
    """Every second step is interrupted for 50 ms, and the worker has a share of its core: the busy time knows neither,
    and the share is in the scale."""
    turn = iter(range(1000))

    def run(step: Step) -> Took:
        busy = roofline(step, bandwidth=2e10, rate=5e10)
        return Took(busy / share + 0.05 * (next(turn) % 2), busy)

    cost = measure(run, SHAPES, budget_s=60.0, rounds=2)  # 9 shapes: each is interrupted once
    unseen = [Step.of_prompt(n) for n in (24, 100, 400)] + [Step.of_decodes([200] * n) for n in (3, 6)]
    errors = [abs(cost.seconds(s) * share / roofline(s, bandwidth=2e10, rate=5e10) - 1) for s in unseen]
    assert sum(errors) / len(errors) < 0.15


@given(st.floats(1 / 3, 3))
def test_a_wrong_speed_is_corrected_within_20_measurements(wrong: float) -> None:
    correction = Correction()
    for _ in range(20):
        correction.add(1.0, 1.0)  # the worker was as fast as predicted
    for _ in range(20):
        correction.add(1.0, wrong)
    assert correction.factor == pytest.approx(wrong, rel=0.15)
