"""The pre-norm lab: initialization, stability, warmup, and verdicts."""

from __future__ import annotations

import math

import pytest
import torch

from bagu.lab.core import Row
from bagu.lab.model import prenorm_postnorm as lab
from bagu.lab.model.prenorm_postnorm import measure
from bagu.lab.model.prenorm_postnorm.measure import Variant

Rates = tuple[list[float | None], list[float | None]]  # without and with warmup, one per seed


def variant_rows(variant: Variant, rates: Rates, *, gradient: float) -> list[Row]:
    names: Row = {"placement": variant.placement, "init": variant.init}
    rows: list[Row] = [
        names | {"measured": "gradient", "depth_layers": depth, "layer": layer, "gradient_norm": norm}
        for depth in (8, 128)
        for layer, norm in ((0, 9.0), (depth - 1, gradient))
    ]
    for warmup, found in zip((0, 20), rates, strict=True):
        rows += [
            names | {"measured": "learning rate", "depth_layers": 8, "warmup_steps": warmup, "largest_stable_lr": lr}
            for lr in found
        ]
    return rows


NEEDS: Rates = ([0.003, 0.004, 0.005], [0.01, 0.02, 0.03])
FREE: Rates = ([0.1, 0.2, 0.3], [0.1, 0.2, 0.3])
NOISY: Rates = ([0.1, 0.1, 0.3], [0.2, 0.6, 0.6])  # a large gain of the medians, but the seeds differ as much


def rows(
    *, plain_post: Rates = NEEDS, scaled_post: Rates = NEEDS, pre: Rates = FREE, gradient: float = 2.0
) -> list[Row]:
    made = []
    for variant in lab.RATED:
        post = variant.placement == "post"
        rates = (scaled_post if variant.init == "scaled" else plain_post) if post else pre
        made += variant_rows(variant, rates, gradient=gradient if post else 0.5)
    return made


def test_the_verdict_flips() -> None:
    assert lab.verdict(rows()).kind == "held"
    assert lab.verdict(rows(pre=NOISY)).kind == "held"
    assert lab.verdict(rows(pre=NEEDS)).kind == "did not hold"
    assert lab.verdict(rows(plain_post=FREE, scaled_post=FREE)).kind == "did not hold"
    assert lab.verdict(rows(gradient=0.6)).kind == "did not hold"  # the effect without the cause
    partly = lab.verdict(rows(scaled_post=NOISY))
    assert partly.kind == "holds only where"
    assert partly.sentence_en.startswith("Only with the plain initialization.")
    assert "0.004 [0.003–0.005] → 0.02 [0.01–0.03] for post-norm" in partly.sentence_en


def test_a_seed_that_is_never_stable_counts_as_the_lowest_rate() -> None:
    found = lab.findings(rows(plain_post=([None, None, None], [0.01, 0.01, 0.01])))[Variant("post", "plain")]
    assert found.without == [measure.LOWEST] * 3
    assert found.needs_warmup


def test_plain_undoes_the_division_by_depth() -> None:
    plain, scaled = (measure.build(Variant("pre", init), 8, seed=1) for init in ("plain", "scaled"))
    for (name, a), (_, b) in zip(plain.named_parameters(), scaled.named_parameters(), strict=True):
        back = name.endswith((".attention.out.weight", ".ffn.down.weight"))
        torch.testing.assert_close(a, b * math.sqrt(16) if back else b, msg=name)
        if back:
            assert a.std().item() == pytest.approx(measure.D**-0.5, rel=0.1)


@pytest.mark.slow
def test_gradients_before_training_match_the_theory() -> None:
    data = measure.batches((0, 1, 2))

    def last(placement: measure.Placement, depth: int) -> float:
        row = measure.gradient_rows(Variant(placement, "plain"), depth, data)[-1]
        assert row["layer"] == depth - 1
        return float(row["gradient_norm"])  # type: ignore[arg-type]

    post, pre = last("post", 32) / last("post", 8), last("pre", 32) / last("pre", 8)
    assert 0.7 < post < 1.6  # the same at any depth, up to ±0.3 per seed from weights and text
    assert 0.35 < pre < 0.65  # as 1 / sqrt(depth): 0.5


def test_a_learning_rate_is_stable_if_the_batch_is_learned() -> None:
    batch = measure.batches((0,))[0]

    def learns(lr: float) -> bool:
        return measure.learns(measure.build(Variant("pre", "plain"), 2, 0), batch, lr, warmup=2, steps=12, seed=0)

    assert learns(1e-2)
    assert not learns(1e-6)  # too slow
    assert not learns(1e4)  # too fast
    frequencies = torch.tensor([3, 3, 5, 5, -100])
    assert measure.entropy(frequencies) == pytest.approx(math.log(2))
