"""Bad batches: seen before the update, skipped, and left behind by going back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import VOCAB, Notes, loader, model

from bagu.data.loader import Loader
from bagu.data.prefetch import Prefetch
from bagu.nn.model import Transformer
from bagu.train import OptimizerConfig, StabilityConfig, TrainConfig, TrainingDiverged, checkpoint, fit
from bagu.train.cross_entropy import CrossEntropy, TargetTotals
from bagu.train.loss import MicroBatchLoss
from bagu.train.stability import Guard, robust_z
from bagu.types import IGNORE, Batch

STABILITY = StabilityConfig(window=32, min_history=8, max_skips=3, max_rollbacks=2)


def guard_with(losses: list[float], norms: list[float] | None = None) -> Guard:
    guard = Guard(STABILITY)
    for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True):
        assert guard.judge(loss, norm) is None
    return guard


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused_from_the_first_step_on(bad: float) -> None:
    assert "loss" in str(Guard(STABILITY).judge(bad, 1.0))
    assert "gradient norm" in str(Guard(STABILITY).judge(1.0, bad))


def test_spikes_are_refused_and_remembered_by_nobody() -> None:
    guard = guard_with([3.0, 3.1, 2.9, 3.05, 2.95] * 3)
    for _ in range(20):  # were they remembered, the median would follow them
        assert "robust standard deviations" in str(guard.judge(6.0, 1.0))
    assert guard.skips_in_a_row == 20
    assert "gradient norm" in str(guard.judge(3.0, 50.0))
    assert guard.judge(3.0, 1.0) is None and guard.skips_in_a_row == 0


@given(st.lists(st.floats(0.1, 10), min_size=8, max_size=32), st.floats(0.0, 0.1))
def test_falling_is_never_a_spike(history: list[float], below: float) -> None:
    guard = Guard(dataclasses.replace(STABILITY, spike_threshold=None))
    for x in history:
        guard.judge(x, x)
    guard.config = STABILITY
    assert guard.judge(min(history) - below, 1e-3) is None


@given(st.lists(st.floats(0.5, 2), min_size=9, max_size=31), st.integers(0, 3), st.floats(1e3, 1e9))
def test_the_z_score_does_not_move_with_a_few_wild_values(history: list[float], wild: int, size: float) -> None:
    z = robust_z(100.0, history + [size] * wild, floor=0.1)
    assert z > 8


def test_a_healthy_descent_is_left_alone() -> None:
    """Losses and norms as of a real run: a fast fall, noise of a few percent, a norm that doubles in the warm-up."""
    stream = torch.Generator().manual_seed(0)
    guard = Guard(StabilityConfig())
    for s in range(400):
        noise = torch.randn(2, generator=stream).tolist()
        loss = (2 + 7 * math.exp(-s / 40)) * (1 + 0.04 * noise[0])
        norm = (0.5 + min(s, 100) / 100) * math.exp(0.3 * noise[1])
        assert guard.judge(loss, norm) is None, s


class Poison:
    """A loader whose steps in `span` have random targets: finite, and unlike all that was learned."""

    def __init__(self, span: range) -> None:
        self.loader, self.span = loader(), span

    def batch(self, step: int) -> tuple[Batch, ...]:
        batches = self.loader.batch(step)
        if step not in self.span:
            return batches
        stream = torch.Generator().manual_seed(step)
        return tuple(
            dataclasses.replace(
                b,
                targets=torch.where(
                    b.targets == IGNORE, IGNORE, torch.randint(VOCAB, b.targets.shape, generator=stream)
                ),
            )
            for b in batches
        )

    def prefetch(self, start: int) -> Prefetch[tuple[Batch, ...]]:
        return Prefetch(self.batch, start)

    def cursor(self, step: int) -> dict[str, object]:
        return self.loader.cursor(step)

    def restore(self, cursor: Mapping[str, Any]) -> None:
        pass


class NaNAt(CrossEntropy):
    """The cross-entropy, NaN for the batches of some data steps."""

    def __init__(self, data: Loader, steps: range) -> None:
        super().__init__()
        self.bad = [data.batch(s)[0].ids for s in steps]

    def __call__(self, m: Transformer, batch: Batch, totals: TargetTotals) -> MicroBatchLoss:
        part = super().__call__(m, batch, totals)
        poisoned = any(torch.equal(batch.ids, ids) for ids in self.bad)
        return part._replace(loss=part.loss * math.nan) if poisoned else part


CONFIG = TrainConfig(steps=40, optimizer=OptimizerConfig(lr=0.02), stability=STABILITY, save_every=10)


def test_a_poisoned_batch_is_skipped_and_the_run_recovers() -> None:
    notes, clean, config = Notes(), Notes(), dataclasses.replace(CONFIG, steps=60, save_every=None)
    fit(config, model(), loader(), observers=[clean])
    result = fit(config, model(), Poison(range(50, 52)), observers=[notes])
    assert [(e["kind"], e["step"], e["data_step"]) for e in notes.events] == [("skip", 50, 50), ("skip", 50, 51)]
    assert result.step == 60
    assert notes.rows[49] == {**clean.rows[49], **_timings(notes.rows[49])}  # the same run up to there
    after, want = (sum(n.rows[s]["loss_nats"] for s in range(55, 60)) for n in (notes, clean))
    assert after < 1.3 * want


@pytest.mark.slow
def test_a_bad_stretch_is_left_behind_by_going_back(tmp_path: Path) -> None:
    data, notes = loader(), Notes()
    result = fit(CONFIG, model(), data, folder=tmp_path, observers=[notes], loss=NaNAt(data, range(25, 31)))
    assert [(e["step"], e["data_step"]) for e in notes.of("skip")] == [
        (25, 25), (25, 26), (25, 27), (20, 28), (20, 29), (20, 30),
    ]  # fmt: skip
    assert [(e["from_step"], e["step"], e["data_step"]) for e in notes.of("rollback")] == [(25, 20, 28), (20, 20, 31)]
    assert result.step == 40 and sorted(notes.rows) == list(range(40))  # each step once, after the rewinds
    assert all(math.isfinite(row["loss_nats"]) for row in notes.rows.values())
    last = checkpoint.state_of(tmp_path / "step-000000040")
    assert (last["step"], last["data_step"], last["guard"]["rollbacks"]) == (40, 51, 2)


def test_a_run_that_cannot_be_helped_stops_with_a_sentence(tmp_path: Path) -> None:
    data = loader()
    with pytest.raises(TrainingDiverged, match=r"3 batches in a row were refused at step 5 .* no checkpoint"):
        fit(CONFIG, model(), data, folder=tmp_path, loss=NaNAt(data, range(5, 60)))
    with pytest.raises(TrainingDiverged, match="after 2 rollbacks"):
        fit(CONFIG, model(), data, folder=tmp_path / "b", loss=NaNAt(data, range(15, 60)))
    assert checkpoint.checkpoints(tmp_path / "b")


def _timings(row: dict[str, object]) -> dict[str, object]:
    return {k: row[k] for k in ("tokens_per_s", "memory_bytes", "data_wait_s")}
