"""Mixing: at every step each source is within one row of its ideal, whatever step is asked for first."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagu.data.mix import STRIDE, MixConfig, MixPoint, Mixture
from bagu.errors import BaguError

WEIGHT = st.one_of(st.just(0.0), st.floats(1e-6, 1.0))


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    names = [f"s{i}" for i in range(draw(st.integers(1, 9)))]

    def weights() -> dict[str, float]:
        return {name: draw(WEIGHT) for name in names[1:]} | {names[0]: draw(st.floats(1e-3, 1.0))}

    steps = sorted(draw(st.sets(st.integers(0, 300), min_size=1, max_size=3)))
    config = MixConfig(
        schedule=tuple(MixPoint(step=step, weights=weights()) for step in steps),
        temperature=draw(st.sampled_from([0.5, 1.0, 3.0])),
    )
    return Mixture(config, dict.fromkeys(names, 1), rows_per_step=draw(st.integers(1, 9)))


@settings(max_examples=60)
@given(mixture=mixtures())
def test_every_source_stays_within_a_row_of_its_ideal(mixture: Mixture) -> None:
    steps = np.arange(STRIDE + 200)
    counts = np.array([mixture.counts(int(s)) for s in steps])
    assert np.abs(counts - mixture.ideal(steps)).max() < 1 + 1e-5
    assert (counts.sum(1) == steps * mixture.rows_per_step).all()
    assert (np.diff(counts, axis=0) >= 0).all()


@settings(max_examples=20)
@given(mixture=mixtures())
def test_the_ideal_is_the_sum_of_the_shares(mixture: Mixture) -> None:
    shares = np.array([list(mixture.shares(s).values()) for s in range(350)])
    assert np.allclose(shares.sum(1), 1)
    expected = np.concatenate((np.zeros((1, shares.shape[1])), np.cumsum(shares, 0))) * mixture.rows_per_step
    assert np.allclose(mixture.ideal(np.arange(351)), expected)


def two(weights: dict[str, float] | None = None, **more: object) -> Mixture:
    return Mixture(MixConfig(weights=weights, **more), {"a": 300, "b": 100}, rows_per_step=8)  # type: ignore[arg-type]


def test_counts_do_not_depend_on_the_first_step_asked_for() -> None:
    forward, backward = two({"a": 0.7, "b": 0.3}), two({"a": 0.7, "b": 0.3})
    steps = [0, 1, 255, 256, 257, 700, 2000]
    assert [forward.counts(s) for s in steps] == [backward.counts(s) for s in reversed(steps)][::-1]


def test_each_source_continues_where_the_last_step_ended() -> None:
    mixture = two({"a": 0.7, "b": 0.3})
    rows = [row for step in range(50) for row in mixture.rows(step)]
    for source in (0, 1):
        numbers = [n for s, n in rows if s == source]
        assert numbers == list(range(len(numbers)))
    assert len(rows) == 400
    first = [source for source, _ in two({"a": 1, "b": 1}).rows(0)]
    assert first == [0, 1] * 4  # interleaved, so that micro-batches have the same mix


def test_default_weights_are_token_counts_and_temperature_flattens_them() -> None:
    assert two().shares(0) == pytest.approx({"a": 0.75, "b": 0.25})
    assert two({"a": 3, "b": 1}).shares(9) == pytest.approx({"a": 0.75, "b": 0.25})
    hot = two(temperature=2.0).shares(0)
    assert hot["a"] / hot["b"] == pytest.approx(3**0.5)


def test_a_schedule_moves_linearly_and_stays_at_its_ends() -> None:
    points = (MixPoint(step=10, weights={"a": 1, "b": 0}), MixPoint(step=20, weights={"a": 0, "b": 1}))
    mixture = two(schedule=points)
    assert [mixture.shares(s)["b"] for s in (0, 10, 15, 20, 99)] == pytest.approx([0, 0, 0.5, 1, 1])
    assert {source for s in range(10) for source, _ in mixture.rows(s)} == {0}
    assert {source for s in range(20, 40) for source, _ in mixture.rows(s)} == {1}


def test_a_late_step_takes_seconds() -> None:
    mixture = Mixture(MixConfig(), {"a": 5, "b": 3, "c": 2}, rows_per_step=64)
    began = time.process_time()
    counts = mixture.counts(100_000)
    assert time.process_time() - began < 20  # 0.4 s of CPU; iterating over all rows would take minutes
    assert np.abs(np.array(counts) - [3.2e6, 1.92e6, 1.28e6]).max() < 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"weights": {"a": 1, "bb": 1}}, "no source in this mixture 'bb'"),
        ({"weights": {"a": 1}}, "no weight for b"),
        ({"weights": {"a": 0, "b": 0}}, "weights of the mixture"),
        ({"weights": {"a": -1, "b": 2}}, "weights of the mixture"),
        ({"weights": {"a": float("nan"), "b": 2}}, "weights of the mixture"),
        ({"temperature": 0}, "temperature"),
        ({"weights": {"a": 1, "b": 1}, "schedule": (MixPoint(step=0, weights={}),)}, "both weights and a schedule"),
        ({"schedule": (MixPoint(step=5, weights={}), MixPoint(step=5, weights={}))}, "steps"),
    ],
)
def test_impossible_mixtures_are_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(BaguError, match=message):
        two(**config)  # type: ignore[arg-type]
