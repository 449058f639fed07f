"""The formulas of PPO and GRPO against loops over numbers in fp64, and their gradients against finite algebra."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bagu.train.rl.formulas import (
    Estimator,
    Normalization,
    adapted_coefficient,
    clipped,
    clipped_policy_loss,
    clipped_value_loss,
    generalized_advantages,
    group_advantages,
    importance_weights,
    kl_estimate,
    rewards_differ,
    token_weights,
    whitened,
)

EPS64 = torch.finfo(torch.float64).eps
LOW, HIGH = 0.2, 0.28


def draws(*names: str, size: int = 40, seed: int = 0) -> list[torch.Tensor]:
    """fp64 normals, one tensor per name."""
    stream = np.random.default_rng(seed)
    return [torch.tensor(stream.normal(size=size), dtype=torch.float64) for _ in names]


def close(found: torch.Tensor, wanted: list[float], terms: int = 8) -> None:
    """Equal up to the rounding of a few fp64 operations."""
    want = torch.tensor(wanted, dtype=torch.float64)
    scale = want.abs().max().clamp(min=1)
    assert (found.double() - want).abs().max() <= terms * EPS64 * scale, (found - want).abs().max()


def gradient(loss: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(loss.sum(), of)
    return found


# --- KL ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_and_their_gradients(estimator: Estimator) -> None:
    policy, reference = draws("policy", "reference")
    policy.requires_grad_()
    found = kl_estimate(policy, reference, estimator)
    pairs = list(zip(policy.tolist(), reference.tolist(), strict=True))
    values = {
        "k1": lambda p, q: p - q,
        "k2": lambda p, q: (q - p) ** 2 / 2,
        "k3": lambda p, q: math.exp(q - p) - 1 - (q - p),
    }
    slopes = {"k1": lambda p, q: 1.0, "k2": lambda p, q: p - q, "k3": lambda p, q: 1 - math.exp(q - p)}
    close(found.detach(), [values[estimator](p, q) for p, q in pairs])
    close(gradient(found, policy), [slopes[estimator](p, q) for p, q in pairs])


def test_kl_estimates_have_the_stated_means_and_gradients() -> None:
    """Exact expectations over a categorical policy: the values of k1 and k3 are the KL; as losses k1 has gradient 0, k2
    that of KL(policy || reference), k3 that of KL(reference || policy)."""
    logits, other = draws("policy", "reference", size=7)
    logits.requires_grad_()
    policy, reference = logits.log_softmax(0), other.log_softmax(0)
    p = policy.exp().detach()
    kl = (policy.exp() * (policy - reference)).sum()
    reverse = (reference.exp() * (reference - policy)).sum()
    wanted = {"k1": torch.zeros_like(logits)}
    (wanted["k2"],) = torch.autograd.grad(kl, logits, retain_graph=True)
    (wanted["k3"],) = torch.autograd.grad(reverse, logits, retain_graph=True)
    estimators: tuple[Estimator, ...] = ("k1", "k2", "k3")
    for name in estimators:
        mean = (p * kl_estimate(policy, reference, name)).sum()
        if name != "k2":
            assert (mean - kl).detach().abs() <= 16 * EPS64
        (slope,) = torch.autograd.grad(mean, logits, retain_graph=True)
        assert (slope - wanted[name]).abs().max() <= 16 * EPS64, name


# --- ratios -----------------------------------------------------------------------------------------------------------


def test_the_clipped_policy_loss_and_its_gradient() -> None:
    log_ratio, advantages = draws("ratio", "advantages", size=200)
    log_ratio.requires_grad_()
    ratio = log_ratio.exp()
    found = clipped_policy_loss(ratio, advantages, clip_low=LOW, clip_high=HIGH)
    values, slopes, flags = [], [], []
    for x, a in zip(log_ratio.tolist(), advantages.tolist(), strict=True):
        r = math.exp(x)
        bounded = min(max(r, 1 - LOW), 1 + HIGH)
        values.append(-min(r * a, bounded * a))
        flags.append(bounded * a < r * a)  # the constant side is the smaller: no gradient
        slopes.append(0.0 if flags[-1] else -r * a)
    close(found.detach(), values)
    close(gradient(found, log_ratio), slopes)
    assert clipped(ratio.detach(), advantages, clip_low=LOW, clip_high=HIGH).tolist() == flags
    assert 20 < sum(flags) < 180, "the draw should have both kinds"


def test_a_nan_ratio_is_a_nan_loss_whatever_the_advantage() -> None:
    nan = torch.full((3,), torch.nan)
    assert clipped_policy_loss(nan, torch.tensor([1.0, -1.0, 0.0]), clip_low=LOW, clip_high=HIGH).isnan().all()


def test_importance_weights_are_truncated_and_have_no_gradient() -> None:
    old, engine = draws("old", "engine")
    old.requires_grad_()
    found = importance_weights(old, engine, cap=2.0)
    close(found, [min(math.exp(o - e), 2.0) for o, e in zip(old.tolist(), engine.tolist(), strict=True)])
    assert not found.requires_grad and float(found.max()) == 2.0
    assert importance_weights(engine, engine, cap=2.0).eq(1).all()


# --- advantages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_gae_is_the_discounted_sum_of_errors(seed: int) -> None:
    rewards, values = (x.numpy() for x in draws("rewards", "values", size=9, seed=seed))
    gamma, decay = 0.97, 0.9
    after = [*values[1:], 0.0]
    errors = [rewards[t] + gamma * after[t] - values[t] for t in range(9)]
    wanted = [sum((gamma * decay) ** (u - t) * errors[u] for u in range(t, 9)) for t in range(9)]
    close(torch.from_numpy(generalized_advantages(rewards, values, discount=gamma, decay=decay)), wanted, terms=32)


def test_gae_without_discount_and_decay_is_the_return_minus_the_value() -> None:
    rewards, values = (x.numpy() for x in draws("rewards", "values", size=9))
    found = generalized_advantages(rewards, values, discount=1.0, decay=1.0)
    close(torch.from_numpy(found + values), [float(rewards[t:].sum()) for t in range(9)], terms=32)


def test_group_advantages() -> None:
    rewards = [1.0, 0.0, 0.0, 3.0]
    mean = sum(rewards) / 4
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 3)
    close(torch.from_numpy(group_advantages(rewards, scale=True)), [(r - mean) / deviation for r in rewards])
    close(torch.from_numpy(group_advantages(rewards, scale=False)), [r - mean for r in rewards])
    for scale in (True, False):
        assert not group_advantages([0.1] * 7, scale=scale).any()
        assert not group_advantages([2.0], scale=scale).any()
        assert not group_advantages([0.1 + 0.2, 0.3, 0.3], scale=scale).any()
        assert not group_advantages([5.000001, 5.0], scale=scale).any()  # two roundings of fp32
    assert not rewards_differ([0.0, 0.0]) and rewards_differ([0.0, 1e-9]) and rewards_differ([1.0, 1.001])


def test_whitening() -> None:
    (x,) = (x.numpy() for x in draws("x", size=50))
    mean = sum(x.tolist()) / 50
    deviation = math.sqrt(sum((v - mean) ** 2 for v in x.tolist()) / 50)
    close(torch.from_numpy(whitened(x)), [(v - mean) / deviation for v in x.tolist()], terms=64)
    assert not whitened(np.full(5, 0.1)).any()


def test_the_clipped_value_loss_and_its_gradient() -> None:
    values, old, returns = draws("values", "old", "returns", size=100)
    values.requires_grad_()
    for clip in (None, 0.3):
        found = clipped_value_loss(values, old, returns, clip)
        wanted, slopes = [], []
        for v, o, r in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True):
            near = v if clip is None else min(max(v, o - clip), o + clip)
            wanted.append(max((v - r) ** 2, (near - r) ** 2) / 2)
            slopes.append(v - r if (v - r) ** 2 >= (near - r) ** 2 else 0.0)
        close(found.detach(), wanted)
        close(gradient(found, values), slopes)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_token_weights() -> None:
    lengths = [3, 1, 8]
    each: dict[Normalization, list[float]] = {
        "token": [1 / 12] * 3, "sequence": [1 / 9, 1 / 3, 1 / 24], "fixed": [1 / 48] * 3,
    }  # fmt: skip
    for how, wanted in each.items():
        assert token_weights(lengths, how, max_tokens=16) == pytest.approx(wanted, rel=4 * EPS64)
    for how in ("token", "sequence"):  # the mean of ones is 1
        total = sum(n * w for n, w in zip(lengths, token_weights(lengths, how, max_tokens=16), strict=True))
        assert total == pytest.approx(1, rel=8 * EPS64)


def test_the_adaptive_coefficient_moves_towards_its_target() -> None:
    assert adapted_coefficient(0.1, 0.05, target=0.05) == 0.1
    assert adapted_coefficient(0.1, 5.0, target=0.05) == pytest.approx(0.1 * 1.02, rel=4 * EPS64)
    assert adapted_coefficient(0.1, 0.0, target=0.05) == pytest.approx(0.1 * 0.98, rel=4 * EPS64)
    assert adapted_coefficient(0.1, 0.055, target=0.05) == pytest.approx(0.1 * 1.01, rel=32 * EPS64)
