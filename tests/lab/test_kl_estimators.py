"""The KL lab: exact moments of the estimators, verdicts."""

from __future__ import annotations

import math

import pytest
import torch

from bagu.lab.core import Row
from bagu.lab.post_train import kl_estimators as lab


def test_moments_are_those_of_the_formulas() -> None:
    p, q = (0.5, 0.5), (0.25, 0.75)
    policy, reference = (torch.tensor([x], dtype=torch.float64).log() for x in (p, q))
    rows = {row["estimator"]: row for row in lab.measure("model", 1, policy, reference, 4)}
    d = [math.log(b / a) for a, b in zip(p, q, strict=True)]
    kl = sum(-a * x for a, x in zip(p, d, strict=True))
    formulas = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
    for name, formula in formulas.items():
        mean = sum(a * formula(x) for a, x in zip(p, d, strict=True))
        deviation = math.sqrt(sum(a * (formula(x) - mean) ** 2 for a, x in zip(p, d, strict=True)))
        assert rows[name]["kl_nats"] == pytest.approx(kl)
        assert rows[name]["bias_nats"] == pytest.approx(mean - kl, abs=1e-15)
        assert rows[name]["deviation_nats"] == pytest.approx(deviation)


def test_batches_scatter_as_the_exact_deviation_says() -> None:
    policy, reference = lab.random_pair(0.5, positions=256)
    for row in lab.measure("categorical", 0.5, policy, reference, 400):
        mean = row["kl_nats"] + row["bias_nats"]  # type: ignore[operator]
        width = row["batch_high_nats"] - row["batch_low_nats"]  # type: ignore[operator]
        expected = row["batch_deviation_nats"]
        # A median of 400 batches has an error of 1.25 / 20 deviations; the width is 2 x 1.96 deviations.
        assert abs(row["batch_median_nats"] - mean) < 0.3 * expected  # type: ignore[operator]
        assert width == pytest.approx(2 * 1.96 * expected, rel=0.2)  # type: ignore[operator]


def rows_of(drift: float, kl: float, k1: float, k3: float) -> list[Row]:
    deviations = {"k1": k1, "k2": 0.1, "k3": k3}
    return [
        {
            "source": "model", "drift": drift, "estimator": name, "kl_nats": kl, "deviation_nats": deviation,
            "bias_nats": 0.1 * kl if name == "k2" else 0.0,
        }
        for name, deviation in deviations.items()
    ]  # fmt: skip


def test_the_verdict_follows_the_deviations() -> None:
    near, far = rows_of(1, 0.01, 0.2, 0.05), rows_of(64, 2.0, 1.0, 3.0)
    assert lab.verdict(near).kind == "held"
    assert lab.verdict(far).kind == "did not hold"
    both = lab.verdict(near + far)
    assert both.kind == "holds only where"
    assert "smaller than k1's at 0.01 nats and larger at 2 nats" in both.sentence_en
    assert "Bias of k2: +10 % and +10 %" in both.sentence_en
