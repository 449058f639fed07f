"""The formulas of preference learning against naive fp64 versions, their gradients, and the calibration of pairs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from bagu.train.preference.calibration import brier_score, calibration_error, reliability
from bagu.train.preference.formulas import bradley_terry, dpo, ipo, kto, simpo

DRAW = torch.Generator().manual_seed(0)
W, L = (3 * torch.randn(64, dtype=torch.float64, generator=DRAW) for _ in range(2))
GOOD = torch.rand(64, generator=DRAW) < 0.4


def nll(x: float, e: float) -> float:
    """Cross-entropy of a coin that shows the label with probability 1 - e, under sigmoid(x)."""
    p = 1 / (1 + math.exp(-x))
    return -(1 - e) * math.log(p) - e * math.log(1 - p)


def up(x: float) -> float:
    return 1 / (1 + math.exp(-x))


Pair = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CASES: dict[str, tuple[Pair, Callable[[float, float, bool], float]]] = {
    "bradley_terry": (bradley_terry, lambda w, l, _: nll(w - l, 0)),
    "bradley_terry_smooth": (lambda w, l: bradley_terry(w, l, smoothing=0.2), lambda w, l, _: nll(w - l, 0.2)),
    "dpo": (lambda w, l: dpo(w, l, beta=0.3), lambda w, l, _: nll(0.3 * (w - l), 0)),
    "dpo_smooth": (lambda w, l: dpo(w, l, beta=0.3, smoothing=0.1), lambda w, l, _: nll(0.3 * (w - l), 0.1)),
    "ipo": (lambda w, l: ipo(w, l, beta=0.3), lambda w, l, _: (w - l - 1 / 0.6) ** 2),
    "simpo": (lambda w, l: simpo(w, l, beta=2.0, gamma=1.0), lambda w, l, _: nll(2 * (w - l) - 1, 0)),
    "kto": (
        lambda w, l: kto(w, GOOD[: len(w)], kl=0.4, beta=0.3) + 0 * l,
        lambda w, l, good: 1 - up(0.3 * (w - 0.4)) if good else 1 - up(0.3 * (0.4 - w)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_formula_equals_its_naive_version_and_has_its_gradient(name: str) -> None:
    loss, naive = CASES[name]
    wanted = [naive(w, l, g) for w, l, g in zip(W.tolist(), L.tolist(), GOOD.tolist(), strict=True)]
    torch.testing.assert_close(loss(W, L), torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    w, l = (x[:8].clone().requires_grad_() for x in (W, L))
    assert torch.autograd.gradcheck(loss, (w, l))


def test_equal_answers_have_a_loss_of_ln_2_also_with_smoothing() -> None:
    zero = torch.zeros(3)
    for loss in (bradley_terry(zero, zero), dpo(zero, zero, beta=0.1), dpo(zero, zero, beta=5.0, smoothing=0.3)):
        torch.testing.assert_close(loss, torch.full((3,), math.log(2)))


def test_large_margins_do_not_overflow() -> None:
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = dpo(far, torch.zeros(2), beta=1.0, smoothing=0.1)
    loss.sum().backward()
    assert bool(loss.isfinite().all()) and far.grad is not None and bool(far.grad.isfinite().all())


def test_smoothing_prefers_a_finite_margin() -> None:
    """The minimum is where sigmoid(margin) is the probability that the label is right."""
    margin = torch.tensor(math.log(0.8 / 0.2), dtype=torch.float64, requires_grad=True)
    dpo(margin, torch.zeros((), dtype=torch.float64), beta=1.0, smoothing=0.2).backward()
    assert margin.grad is not None and abs(float(margin.grad)) < 1e-15


def test_a_calibrated_model_has_no_calibration_error() -> None:
    """Of 1000 pairs with a probability of 0.8, 800 are labelled so."""
    margin = math.log(0.8 / 0.2)
    margins = [margin] * 800 + [-margin] * 200
    bins = reliability(margins)
    assert [b.pairs for b in bins] == [0, 0, 0, 1000, 0] or [b.pairs for b in bins] == [0, 0, 1000, 0, 0]
    assert calibration_error(bins) == pytest.approx(0, abs=1e-12)
    assert brier_score(margins) == pytest.approx(0.8 * 0.2**2 + 0.2 * 0.8**2)


def test_an_overconfident_model_has_one() -> None:
    bins = reliability([20.0] * 60 + [-20.0] * 40)
    assert bins[-1].pairs == 100 and bins[-1].accuracy == 0.6
    assert calibration_error(bins) == pytest.approx(0.4)
    assert calibration_error(reliability([0.0] * 10)) == 0 and brier_score([0.0]) == 0.25
