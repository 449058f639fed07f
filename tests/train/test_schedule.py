"""What holds for every schedule, and the shape of each."""

from __future__ import annotations

import math
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagu.errors import ArgumentError
from bagu.train.schedule import ScheduleConfig, factor

KINDS = get_args(get_type_hints(ScheduleConfig)["kind"])


@st.composite
def schedules(draw: st.DrawFn) -> tuple[ScheduleConfig, int]:
    kind = draw(st.sampled_from(KINDS))
    config = ScheduleConfig(
        kind=kind,
        warmup_steps=draw(st.integers(0, 60)),
        final=None if kind == "constant" else draw(st.none() | st.floats(0, 1)),
        decay_share=draw(st.none() | st.floats(0.01, 1)) if kind == "wsd" else None,
    )
    return config, draw(st.integers(1, 200))


@given(schedules())
def test_it_rises_to_the_peak_and_never_rises_again(case: tuple[ScheduleConfig, int]) -> None:
    config, steps = case
    values = [factor(config, s, steps) for s in range(steps + 1)]
    up, down = values[: config.warmup_steps], values[max(config.warmup_steps - 1, 0) :]
    assert all(0 < v <= 1 for v in up) and up == sorted(up)
    assert down == sorted(down, reverse=True)
    if config.warmup_steps <= steps:
        assert math.isclose(max(values), 1.0)
    if config.warmup_steps < steps and config.kind != "constant":
        assert math.isclose(values[-1], config.final or 0.0, abs_tol=1e-12)  # one past the last step


@given(schedules(), st.integers(0, 199))
def test_no_update_has_a_rate_of_zero(case: tuple[ScheduleConfig, int], step: int) -> None:
    config, steps = case
    assert factor(config, step % steps, steps) > 0


def test_shapes() -> None:
    cosine, linear = ScheduleConfig(kind="cosine"), ScheduleConfig(kind="linear", final=0.5)
    assert factor(cosine, 50, 100) == pytest.approx(0.5)
    assert factor(cosine, 25, 100) == pytest.approx(0.5 + math.sqrt(0.5) / 2)
    assert factor(linear, 50, 100) == pytest.approx(0.75)
    wsd = ScheduleConfig(kind="wsd", warmup_steps=10, decay_share=0.25)
    assert [factor(wsd, s, 100) for s in (0, 4, 9, 50, 75)] == [0.1, 0.5, 1.0, 1.0, 1.0]
    assert factor(wsd, 76, 100) == pytest.approx(1 - math.sqrt(1 / 25))


def test_options_without_effect_are_refused() -> None:
    for wrong in ({"kind": "cosine", "decay_share": 0.1}, {"kind": "constant", "final": 0.1}, {"warmup_steps": -1}):
        with pytest.raises(ArgumentError, match=list(wrong)[-1]):
            ScheduleConfig(**wrong)
