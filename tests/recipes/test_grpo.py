"""GRPO: its loss against a loop over numbers, refused steps, a bandit with a known answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from policy_run import CONTEXT, Notes, policy, rollouts

from bagu.config import ConfigError
from bagu.data.sequences import Tokens
from bagu.nn.lora import add_lora
from bagu.nn.model import Transformer
from bagu.train import OptimizerConfig, TrainConfig, TrainState, fit, step
from bagu.train.rl.formulas import Normalization
from bagu.train.rl.grpo import GroupRelative
from bagu.train.rl.policy_loss import PolicyLoss
from bagu.train.rl.policy_objective import PolicyObjective
from bagu.train.rl.rollout import Answer, PackShape, RolloutBatch

GRPO = GroupRelative(prompts=2, samples=3, max_tokens=5, epochs=2, kl=0.3, kl_estimator="k3", importance_cap=1.1)
SHAPE = PackShape(tokens=4 * CONTEXT, segments=6, context=CONTEXT)
REWARDS = ([1.0, 0.0, 0.25], [0.0, 2.0, 2.0])


def drawn_answers(seed: int = 0) -> list[Answer]:
    """Two groups of three answers of unlike lengths, with logprobs near those of a policy that knows nothing."""
    stream = np.random.default_rng(seed)
    answers = []
    for group, rewards in enumerate(REWARDS):
        for reward in rewards:
            start, length = 2 + group, int(stream.integers(1, 6))
            ids = tuple(stream.integers(0, 8, start + length).tolist())
            engine, old, reference = (stream.normal(-math.log(8), 0.2, length) for _ in range(3))
            answer = Answer(tokens=Tokens(ids=ids, start=start), prompt=group, reward=reward)
            answers.append(answer.plus(engine=engine, old=old, reference=reference))
    return answers


def batches_of(loss: PolicyLoss, answers: Sequence[Answer], *parts: Sequence[int]) -> list[RolloutBatch]:
    """The micro-batches of one step of all answers, divided into `parts`."""
    ready = loss.advantages(answers)
    weights = loss.weights([a.tokens.num_targets for a in ready])
    ready = [a.plus(weights=np.full(a.tokens.num_targets, w)) for a, w in zip(ready, weights, strict=True)]
    return [RolloutBatch.of([ready[i] for i in part], SHAPE) for part in parts or [range(len(ready))]]


def logprobs_of(model: Transformer, answer: Answer) -> torch.Tensor:
    """The logprobs of the tokens of an answer, alone and in fp64."""
    ids = torch.tensor(answer.tokens.ids)
    n = len(ids)
    hidden = model(ids, torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n).hidden
    return model.logits(hidden).log_softmax(1)[:-1].gather(1, ids[1:, None])[answer.tokens.start - 1 :, 0]


def naive(model: Transformer, answers: Sequence[Answer], config: GroupRelative) -> torch.Tensor:
    """The loss of GRPO, a token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    lengths = [a.tokens.num_targets for a in answers]
    for answer, length in zip(answers, lengths, strict=True):
        group = [a.reward for a in answers if a.prompt == answer.prompt]
        mean = sum(group) / len(group)
        advantage = answer.reward - mean
        if config.scale:
            advantage /= math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        weight = {
            "token": 1 / sum(lengths), "sequence": 1 / (len(answers) * length),
            "fixed": 1 / (len(answers) * config.max_tokens),
        }[config.normalization]  # fmt: skip
        columns = {name: column.astype(np.float64) for name, column in answer.columns.items()}
        for t, logprob in enumerate(logprobs_of(model, answer)):
            engine, old, reference = (float(columns[name][t]) for name in ("engine", "old", "reference"))
            against = engine if config.importance_cap is None else old
            ratio = (logprob - against).exp()
            bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            part = -torch.minimum(ratio * advantage, bounded * advantage)
            if config.importance_cap is not None:
                part = part * min(math.exp(old - engine), config.importance_cap)
            d = reference - logprob
            kl = d**2 / 2 if config.kl_estimator == "k2" else d.exp() - 1 - d
            total = total + weight * (part + config.kl * kl)
    return total


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"normalization": "sequence"}, {"normalization": "fixed", "scale": False}, {"importance_cap": None},
        {"kl_estimator": "k2", "clip_high": 0.5, "clip_low": 0.05},
    ],
    ids=str,
)  # fmt: skip
def test_the_loss_and_its_gradient_are_those_of_a_loop_over_tokens(changes: dict[str, Any]) -> None:
    """In fp64 except for the logprobs, which are fp32: that bounds the difference."""
    config, model = replace(GRPO, **changes), policy().double()
    loss, answers = config.loss(model), drawn_answers()
    (batch,) = batches_of(loss, answers)
    part = loss(model, batch, loss.totals([batch]))
    want = naive(model, answers, config)
    eps = torch.finfo(torch.float32).eps
    assert abs(float(part.loss.detach()) - float(want.detach())) <= 32 * eps * max(1, abs(float(want.detach())))
    found, wanted = (torch.autograd.grad(x, list(model.parameters())) for x in (part.loss, want))
    size = max(float(w.abs().max()) for w in wanted)
    for f, w in zip(found, wanted, strict=True):
        assert float((f - w).abs().max()) <= 256 * eps * size


@pytest.mark.parametrize("how", ["token", "sequence", "fixed"])
def test_micro_batches_add_up_to_the_step(how: Normalization) -> None:
    config, model = replace(GRPO, normalization=how), policy()
    values = []
    for parts in ([range(6)], [[0, 3], [1, 2, 4], [5]]):
        loss = config.loss(model)
        state = TrainState(model, TrainConfig(optimizer=OptimizerConfig(kind="sgd", lr=0.0), clip=None), loss)
        result = step(state, batches_of(loss, drawn_answers(), *parts))
        values.append((result.loss, result.grad_norm, *(result.metrics[k] for k in ("ratio_mean", "parity_nats"))))
        state.close()
    assert values[0] == pytest.approx(values[1], rel=1e-5)


@pytest.mark.parametrize("column", ["old", "engine"])
def test_a_nan_in_a_ratio_stops_the_step_before_the_update(column: str) -> None:
    model = policy()
    loss = GRPO.loss(model)
    state = TrainState(model, TrainConfig(), loss)
    before = state.flat.master.clone()
    (batch,) = batches_of(loss, drawn_answers())
    assert batch.batch is not None
    batch.columns[column][int((batch.batch.targets >= 0).nonzero()[3])] = torch.nan
    result = step(state, [batch])
    assert result.skipped is not None and "nan" in result.skipped
    assert torch.equal(state.flat.master, before) and (state.step, state.data_step) == (0, 1)


def chance_of_c(model: Transformer) -> float:
    ids = torch.tensor([0, 1])
    with torch.no_grad():
        hidden = model(ids, torch.arange(2), torch.tensor([0, 2], dtype=torch.int32), 2).hidden
        return float(model.logits(hidden)[-1].softmax(0)[2])


def learn_the_letter(model: Transformer, objective: PolicyObjective, loss: PolicyLoss, **options: Any) -> None:
    """Train for 20 steps: a policy that knows nothing then samples the rewarded letter."""
    assert chance_of_c(model) < 0.25
    config = TrainConfig(steps=20, optimizer=OptimizerConfig(lr=0.03, weight_decay=0.0), **options)
    fit(config, model, rollouts(model, objective, loss), loss=loss)
    assert chance_of_c(model) > 0.9


@pytest.mark.parametrize("precision", [None, "fp8"])
def test_a_bandit_learns_the_letter_that_is_rewarded(precision: Any) -> None:
    """One letter of eight has the reward; a uniform policy samples it with a probability of 1/8."""
    objective = GroupRelative(prompts=4, samples=8, max_tokens=2, kl=0.001)
    model = policy()
    loss = objective.loss(model)
    learn_the_letter(model, objective, loss, precision=precision)
    found = loss.evaluate(model, rollouts(model, objective, loss).held_out(None))
    assert found["val_reward_mean"] is not None and found["val_reward_mean"] > 0.8


def test_lora_trains_the_adapters_only_and_its_base_is_the_reference() -> None:
    objective = GroupRelative(prompts=3, samples=6, max_tokens=3, kl=0.1, epochs=2, invariant=True)
    model = policy()
    add_lora(model, rank=4, alpha=8.0)
    loss = objective.loss(model)
    assert loss.reference is not None and loss.reference.shared
    before = {name: p.clone() for name, p in model.named_parameters()}
    notes = Notes()
    fit(TrainConfig(steps=3, optimizer=OptimizerConfig(lr=0.05)), model, rollouts(model, objective, loss), loss=loss,
        observers=[notes])  # fmt: skip
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora" in name for name in changed)
    assert [row["parity_nats"] for row in notes.rows.values()] == [0, 0, 0]
    assert notes.rows[0]["kl_nats"] == 0.0 and notes.rows[2]["kl_nats"] > 0  # B starts at zero


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"samples": 1}, "compared with others"),
        ({"kl_estimator": "k1"}, "expected gradient is 0"),
        ({"prompts": 0}, "objective.prompts is 0"),
        ({"clip_low": 1.0}, "clip_low is 1"),
        ({"importance_cap": 0.5}, "importance_cap is 0.5"),
        ({"kl": -1.0}, "objective.kl is -1"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(GRPO, **changes)


def test_models_that_cannot_be_sampled_from_are_refused() -> None:
    for changes, said in (
        ({"dropout": 0.1}, "dropout"),
        ({"causal": False}, "both sides"),
        ({"score_head": True}, "score head"),
    ):
        with pytest.raises(ConfigError, match=said):
            GRPO.check_model(replace(policy().config, **changes))
