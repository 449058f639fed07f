"""PPO: its loss against a loop over numbers, the critic, the adaptive KL, a bandit with a known answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from policy_run import Notes, Share, policy, rollouts
from test_grpo import batches_of, drawn_answers, learn_the_letter, logprobs_of

from bagu.config import ConfigError
from bagu.data.sequences import Tokens
from bagu.nn.config import MoEConfig
from bagu.nn.lora import add_lora
from bagu.nn.model import Transformer
from bagu.nn.score import with_score_head
from bagu.train import OptimizerConfig, TrainConfig, TrainState, fit, step
from bagu.train.rl.ppo import ProximalPolicy
from bagu.train.rl.reward_function import Sample, Scored
from bagu.train.rl.rollout import Answer

PPO = ProximalPolicy(prompts=6, max_tokens=5, epochs=2, kl=0.3, discount=0.9, decay=0.8, value_weight=0.4)
EPS = torch.finfo(torch.float32).eps


def with_values(answers: Sequence[Answer]) -> list[Answer]:
    stream = np.random.default_rng(5)
    return [a.plus(values=stream.normal(0, 0.3, a.tokens.num_targets)) for a in answers]


def values_of(critic: Transformer, answer: Answer) -> torch.Tensor:
    """The critic's values before the tokens of an answer, alone."""
    assert critic.score is not None
    ids = torch.tensor(answer.tokens.ids)
    n = len(ids)
    hidden = critic(ids, torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n).hidden
    return critic.score(hidden)[answer.tokens.start - 1 : -1]


def naive(model: Transformer, critic: Transformer, answers: Sequence[Answer], config: ProximalPolicy) -> torch.Tensor:
    """The loss of PPO, a token at a time."""
    kls = {"k1": lambda d: -d, "k2": lambda d: d**2 / 2, "k3": lambda d: math.exp(d) - 1 - d}
    advantages: list[list[float]] = []
    for answer in answers:
        old, reference, values = (answer.columns[n].astype(float).tolist() for n in ("old", "reference", "values"))
        n = len(old)
        rewards = [0.0] * n
        if config.kl_in == "reward":
            rewards = [-config.kl * kls[config.kl_estimator](q - p) for p, q in zip(old, reference, strict=True)]
        rewards[-1] += answer.reward
        errors = [rewards[t] + config.discount * [*values, 0.0][t + 1] - values[t] for t in range(n)]
        both = config.discount * config.decay
        advantages.append([sum(both ** (u - t) * errors[u] for u in range(t, n)) for t in range(n)])
    flat = [a for row in advantages for a in row]
    mean = sum(flat) / len(flat)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in flat) / len(flat))
    total = torch.zeros((), dtype=torch.float64)
    for answer, row in zip(answers, advantages, strict=True):
        values, logprobs = values_of(critic, answer), logprobs_of(model, answer)
        for t, raw in enumerate(row):
            c = {name: float(column[t]) for name, column in answer.columns.items()}
            advantage = (raw - mean) / deviation if config.whiten else raw
            ratio = (logprobs[t] - c["old"]).exp()
            bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            part = -torch.minimum(ratio * advantage, bounded * advantage)
            assert config.importance_cap is not None
            part = part * min(math.exp(c["old"] - c["engine"]), config.importance_cap)
            wanted = raw + c["values"]
            square = (values[t] - wanted) ** 2
            if config.value_clip is not None:
                near = values[t].clamp(c["values"] - config.value_clip, c["values"] + config.value_clip)
                square = torch.maximum(square, (near - wanted) ** 2)
            total = total + (part + config.value_weight * square / 2) / len(flat)
            if config.kl_in == "loss":
                d = c["reference"] - logprobs[t]
                total = total + config.kl * (d**2 / 2 if config.kl_estimator == "k2" else d.exp() - 1 - d) / len(flat)
    return total


@pytest.mark.parametrize(
    "changes",
    [{}, {"kl_in": "loss", "kl_estimator": "k3"}, {"whiten": False, "value_clip": None, "kl_estimator": "k2"}],
    ids=str,
)
def test_the_loss_and_its_gradient_are_those_of_a_loop_over_tokens(changes: dict[str, Any]) -> None:
    """In fp64 except for logprobs and columns, which are fp32: that bounds the difference."""
    config, model = replace(PPO, **changes), policy().double()
    loss = config.loss(model)
    critic = loss.critic
    torch.nn.init.normal_(critic.score.weight, std=0.3, generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr]
    answers = with_values(drawn_answers())
    (batch,) = batches_of(loss, answers)
    part = loss(model, batch, loss.totals([batch]))
    want = naive(model, critic, answers, config)
    assert abs(float(part.loss.detach()) - float(want.detach())) <= 64 * EPS * max(1, abs(float(want.detach())))
    trained = list(model.parameters())
    assert any(p is q for p in trained for q in critic.parameters())
    found, wanted = (torch.autograd.grad(x, trained, allow_unused=True) for x in (part.loss, want))
    size = max(float(w.abs().max()) for w in wanted if w is not None)
    for f, w in zip(found, wanted, strict=True):
        assert (f is None) == (w is None)
        assert f is None or w is None or float((f - w).abs().max()) <= 256 * EPS * size


def test_the_critic_starts_at_zero_from_the_policy_and_is_removed_at_the_end() -> None:
    model = policy()
    names = list(model.state_dict())
    loss = PPO.loss(model)
    shared = {n: p for n, p in loss.critic.named_parameters() if n != "score.weight"}
    assert shared and all(torch.equal(p, model.get_parameter(n)) for n, p in shared.items())
    assert all(p.data_ptr() != model.get_parameter(n).data_ptr() for n, p in shared.items())
    assert loss.critic.score is not None and not loss.critic.score.weight.any()
    assert "critic.score.weight" in model.state_dict()
    assert loss.reference is not None and not hasattr(loss.reference.model, "critic")
    PPO.finish(model)
    assert list(model.state_dict()) == names


def test_a_given_critic_is_trained() -> None:
    given = with_score_head(policy(seed=9)).requires_grad_(False)
    loss = PPO.loss(policy(), {"critic": given})
    assert loss.critic is given and all(p.requires_grad for p in given.parameters())


def test_with_lora_the_critic_shares_the_frozen_weights_and_trains_adapters_of_its_own() -> None:
    model = policy()
    add_lora(model, rank=2, alpha=4.0)
    objective = replace(PPO, invariant=True, kl=0.1)
    loss = objective.loss(model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert loss.critic.embedding.weight is model.embedding.weight
    notes = Notes()
    fit(TrainConfig(steps=2, optimizer=OptimizerConfig(lr=0.05)), model, rollouts(model, objective, loss), loss=loss,
        observers=[notes])  # fmt: skip
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora" in name or name == "critic.score.weight" for name in changed)
    assert any(name.startswith("critic.blocks") for name in changed)
    assert notes.rows[0]["kl_nats"] == notes.rows[0]["parity_nats"] == 0.0


def test_beta_is_adapted_once_per_rollout_and_is_part_of_the_state() -> None:
    objective = replace(PPO, kl_target=1e-6, epochs=3, invariant=False)
    model = policy()
    loss = objective.loss(model)
    state = TrainState(model, TrainConfig(optimizer=OptimizerConfig(lr=0.02)), loss)
    seen = []
    with rollouts(model, objective, loss).prefetch(0) as steps:
        for _ in range(6):
            step(state, next(steps))
            seen.append(loss.beta)
    assert seen[0] == seen[1] == seen[2] == pytest.approx(0.3 * 0.98)  # at the start the KL is 0: below the target
    assert seen[3] == seen[4] == seen[5] != seen[0]
    other = objective.loss(policy())
    other.load_state(loss.state())
    assert other.beta == loss.beta


def test_rewards_that_are_all_equal_train_the_critic() -> None:
    """The first returns do not vary at all: no variance can be explained, and no advantage differs from 0."""

    class Same(Share):
        def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
            return [Scored(reward=0.5) for _ in samples]

    objective = replace(PPO, epochs=1, max_tokens=1, discount=1.0)
    model = policy()
    loss = objective.loss(model)
    state = TrainState(model, TrainConfig(), loss)
    with rollouts(model, objective, loss, reward=Same()).prefetch(0) as steps:
        metrics = step(state, next(steps)).metrics
    assert "explained_variance_percent" not in metrics and metrics["policy_loss"] == 0.0
    assert metrics["value_loss"] == pytest.approx(0.5**2 / 2) and metrics["reward_mean"] == 0.5


def test_experts_of_the_policy_are_balanced_without_those_of_the_critic() -> None:
    moe = MoEConfig(num_experts=4, top_k=2, expert_size=16, bias_rate=0.01)
    model = policy(moe=moe)
    loss = PPO.loss(model)
    state = TrainState(model, TrainConfig(), loss)
    with rollouts(model, PPO, loss).prefetch(0) as steps:
        assert step(state, next(steps)).skipped is None


def test_a_bandit_learns_the_letter_that_is_rewarded_and_the_critic_its_value() -> None:
    objective = ProximalPolicy(prompts=16, max_tokens=2, epochs=2, kl=0.01, value_weight=0.5)
    model = policy()
    loss = objective.loss(model)
    learn_the_letter(model, objective, loss)
    with torch.no_grad():
        values = values_of(loss.critic, Answer(tokens=Tokens(ids=(0, 1, 2, 2), start=2), prompt=0, reward=1.0))
    assert all(0.5 < float(v) < 1.5 for v in values), "the answer will have a reward of 1; the critic began at 0"


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"kl_in": "loss"}, "expected gradient is 0"),
        ({"kl_target": 0.1, "kl": 0.0}, "kl_target is 0.1"),
        ({"discount": 1.5}, "discount is 1.5"),
        ({"value_clip": 0.0}, "value_clip 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(PPO, **changes)


def test_a_critic_needs_a_score_head_and_causal_attention() -> None:
    config = policy().config
    PPO.check_auxiliary("critic", replace(config, score_head=True), config)
    for changes, said in (({}, "no score head"), ({"score_head": True, "causal": False}, "causal=false")):
        with pytest.raises(ConfigError, match=said):
            PPO.check_auxiliary("critic", replace(config, **changes), config)
