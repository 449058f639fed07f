"""Rollouts on the engine: shared weights, the bits of the trainer, seeds, groups, and what a checkpoint keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policy_run import CONTEXT, Letters, Notes, Share, policy, prompts, rollouts, sampler, source

from bagu.data.sequences import Tokens
from bagu.errors import ArgumentError, BaguError
from bagu.nn.model import Transformer
from bagu.serve.cpu.compiled import CompiledDecode
from bagu.train import OptimizerConfig, TrainConfig, TrainState, fit, step
from bagu.train.loss import MicroBatchLoss
from bagu.train.rl.grpo import GroupRelative, GroupRelativeLoss
from bagu.train.rl.loader import RolloutLoader
from bagu.train.rl.policy_loss import PolicyTotals
from bagu.train.rl.reward_function import Sample, Scored
from bagu.train.rl.rollout import Answer, PackShape, Rollout, RolloutBatch, with_columns
from bagu.train.stability import StabilityConfig
from bagu.types import Completion

GRPO = GroupRelative(prompts=3, samples=4, max_tokens=5, invariant=True)
CONFIG = TrainConfig(steps=4, optimizer=OptimizerConfig(lr=0.02))


def answers_of(drawn: Sequence[Completion], asked: Sequence[Sequence[int]]) -> list[Answer]:
    return [
        Answer(tokens=Tokens(ids=(*asked[c.prompt], *c.tokens), start=len(asked[c.prompt])), prompt=c.prompt, reward=0)
        for c in drawn
    ]


def trained_logprobs(model: Transformer, answers: Sequence[Answer], *, tokens: int) -> list[list[float]]:
    """The logprobs that the loss would start from: packed, several answers together."""
    loss = replace(GRPO, epochs=2).loss(model)
    shape = PackShape(tokens=tokens, segments=len(answers), context=CONTEXT)
    with loss.arithmetic():
        found = with_columns(answers, shape, torch.device("cpu"), lambda batch: loss.columns(model, batch))
    return [a.columns["old"].tolist() for a in found]


# --- weights and bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"windows": (4, None), "num_layers": 2}], ids=["full attention", "windows"])
def test_in_invariant_mode_the_trainer_has_the_bits_of_every_sampled_token(changes: dict[str, Any]) -> None:
    """With a cold and a warm prefix cache, after preemption, after an update, and in packs of any size."""
    model = policy(**changes)
    state = TrainState(model, CONFIG)
    asked = [p.ids for p in prompts(6)] + [tuple(range(7)) * 2]
    ample, tight = (sampler(model, GRPO, **settings) for settings in ({}, {"num_blocks": 8, "max_num_seqs": 6}))
    sizes = iter((96, 24, 61, 48, 30))
    for update in range(2):
        before = ample.engine.stats().prefix_hits
        for round, engine in enumerate((ample, ample, tight)):
            if round != 1:
                engine.weights_changed()
            drawn = engine.sample(asked, n=2, max_tokens=10, seeds=list(range(7)))
            want = [list(c.logprobs or ()) for c in drawn]
            assert all(len(w) == len(c.tokens) for w, c in zip(want, drawn, strict=True))
            assert trained_logprobs(model, answers_of(drawn, asked), tokens=next(sizes, 96)) == want
        assert ample.engine.stats().prefix_hits > before and tight.engine.stats().preemptions > 0
        if update == 0:
            loader = rollouts(model, GRPO, GRPO.loss(model))
            with loader.prefetch(0) as steps:
                state.loss = loader.learner  # type: ignore[assignment]
                assert step(state, next(steps)).skipped is None


def test_the_engine_has_the_tensors_of_the_trained_model_and_no_other() -> None:
    model = policy()
    state = TrainState(model, CONFIG, GRPO.loss(model))
    own = sampler(model, GRPO)
    inside = own.engine.runner.model
    assert inside is model and not isinstance(own.engine.runner.compiled, CompiledDecode), "no packed copies"
    addresses = {name: p.data_ptr() for name, p in inside.named_parameters()}
    flat = {slot.name: slot.of(state.flat.master).data_ptr() for slot in state.flat.slots}
    assert addresses == flat, "in fp32 the weights of the engine are the optimizer's masters"
    before = own.sample([(1, 2)], n=1, max_tokens=8, seeds=[0])
    state.flat.master.mul_(3)
    own.weights_changed()
    after = own.engine.runner.model
    assert after is not None and {name: p.data_ptr() for name, p in after.named_parameters()} == flat
    assert own.sample([(1, 2)], n=1, max_tokens=8, seeds=[0]) != before


def test_sampling_leaves_the_model_in_training_mode() -> None:
    model = policy().train()
    own = sampler(model, GRPO)
    own.sample([(1, 2)], n=1, max_tokens=2, seeds=[0])
    own.weights_changed()
    assert model.training and all(m.training for m in model.modules())


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_the_first_ratio_is_exactly_one_in_invariant_mode(cap: float | None, epochs: int) -> None:
    """Without a cap the ratio is that of the trainer to the engine."""
    objective = replace(GRPO, importance_cap=cap, epochs=epochs)
    model = policy()
    loss = objective.loss(model)
    state = TrainState(model, CONFIG, loss)
    with rollouts(model, objective, loss).prefetch(0) as steps:
        first = step(state, next(steps)).metrics
        assert first["ratio_mean"] == first["ratio_max"] == 1.0
        assert first["parity_nats"] == first["update_kl_nats"] == first["clip_share_percent"] == 0.0
        assert first.get("importance_mean", 1.0) == 1.0
        if epochs == 2:
            second = step(state, next(steps)).metrics
            assert second["ratio_max"] != 1.0 and second["update_kl_nats"] != 0 and second["parity_nats"] == 0.0


def test_outside_invariant_mode_the_difference_is_measured_at_every_step() -> None:
    """The engine of this test reports logprobs that are 0.25 nats too low."""
    objective = replace(GRPO, invariant=False, epochs=2, importance_cap=2.0)
    model = policy()
    loss = objective.loss(model)
    loader = rollouts(model, objective, loss)
    sample = loader.sampler.sample

    def off(*args: Any, **options: Any) -> list[Completion]:
        return [replace(c, logprobs=tuple(x - 0.25 for x in c.logprobs or ())) for c in sample(*args, **options)]

    loader.sampler.sample = off  # type: ignore[method-assign]
    state = TrainState(model, CONFIG, loss)
    with loader.prefetch(0) as steps:
        for _ in range(2):
            metrics = step(state, next(steps)).metrics
            assert metrics["parity_nats"] == pytest.approx(0.25, abs=1e-4)  # and the rounding of fast kernels
            assert metrics["importance_mean"] == pytest.approx(np.exp(0.25), abs=1e-4)


# --- groups and draws -------------------------------------------------------------------------------------------------


class ByPrompt(Share):
    """Rewards that differ only among the answers to some prompts."""

    def __init__(self, useful: set[int]) -> None:
        super().__init__()
        self.useful, self.seen = useful, list[int]()

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        self.calls += 1
        self.seen += [s.facts["number"] for s in samples]
        return [
            Scored(reward=float(i % 2) if s.facts["number"] in self.useful else 0.5, fault="late" if i == 0 else None)
            for i, s in enumerate(samples)
        ]


def taken(loader: RolloutLoader, count: int) -> list[tuple[RolloutBatch, ...]]:
    with loader.prefetch(0) as steps:
        return [next(steps) for _ in range(count)]


def test_groups_of_equal_rewards_are_left_out_and_counted() -> None:
    model, reward = policy(), ByPrompt({0, 1, 2})
    objective = replace(GRPO, prompts=6, invariant=False)
    ((batch, *more),) = taken(rollouts(model, objective, objective.loss(model), reward=reward), 1)
    assert not more and batch.rollout["skipped_groups"] == 3 and batch.rollout["reward_faults"] == 1
    assert batch.batch is not None and int((batch.batch.positions == 0).sum()) >= 3 * 4
    assert sorted(set(reward.seen)) == list(range(6)) and reward.calls == 1
    assert set(batch.columns["advantages"].unique().tolist()) != {0.0}


def test_other_prompts_are_drawn_if_no_group_is_left_and_then_a_step_is_counted_without_update() -> None:
    model, reward = policy(), ByPrompt(set())
    objective = replace(GRPO, prompts=2, max_draws=3, epochs=2, minibatches=2, invariant=False)
    loss = objective.loss(model)
    loader = rollouts(model, objective, loss, reward=reward)
    before = [p.clone() for p in model.parameters()]
    result = fit(TrainConfig(steps=5), model, loader, loss=loss)
    assert result.step == 5 and reward.calls == 15, "each rollout has three draws, and is one step"
    assert len(reward.seen) == 15 * 2 * 4 and set(reward.seen) == set(range(6))
    assert result.metrics["skipped_groups"] == 6 and "policy_loss" not in result.metrics
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_dynamic_sampling_replaces_groups_that_were_left_out() -> None:
    model, reward = policy(), ByPrompt({0, 1, 2, 3})
    objective = replace(GRPO, prompts=3, dynamic_sampling=True, invariant=False)
    loader = rollouts(model, objective, objective.loss(model), reward=reward)
    taken(loader, 3)
    assert loader._rollout is not None
    groups = [a.prompt for a in loader._rollout.answers]
    assert len(groups) == 12 and len(set(groups)) == 3 and reward.calls > 3


def test_a_reward_that_is_not_a_number_or_is_missing_ends_the_run() -> None:
    """The rewards of recipes replace these by a default; one that does not is an error of the code."""
    model = policy()
    for scores, said in (([Scored(reward=float("nan"))] * 12, "returned nan"), ([Scored(reward=1.0)], "1 scores for")):
        reward = Share()
        reward.__class__ = type("Bad", (Share,), {"__call__": lambda self, samples, s=scores: s})
        with pytest.raises(BaguError, match=said):
            taken(rollouts(model, GRPO, GRPO.loss(model), reward=reward), 1)


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_rollout_is_a_function_of_the_seed_its_number_and_the_weights() -> None:
    model = policy()
    objective = replace(GRPO, invariant=False)
    same, again, other = (taken(rollouts(model, objective, objective.loss(model), seed=seed), 2) for seed in (0, 0, 1))
    ids = [
        [b.batch.ids.tolist() for steps in run for b in steps if b.batch is not None] for run in (same, again, other)
    ]
    assert ids[0] == ids[1] != ids[2] and ids[0][0] != ids[0][1]


def test_every_epoch_has_every_answer_once() -> None:
    model = policy()
    objective = replace(GRPO, epochs=3, minibatches=2, invariant=False)
    loader = rollouts(model, objective, objective.loss(model), reward=ByPrompt(set(range(6))))
    steps = taken(loader, 6)
    assert loader._rollout is not None and loader.reward.calls == 1  # type: ignore[attr-defined]
    total = sum(a.tokens.num_targets for a in loader._rollout.answers)
    counts = [sum(b.num_targets for b in batches) for batches in steps]
    assert [counts[i] + counts[i + 1] for i in (0, 2, 4)] == [total] * 3
    assert [bool(batches[0].rollout) for batches in steps] == [True, False, False, False, False, False]


def test_steps_are_made_in_order() -> None:
    loader = rollouts(policy(), GRPO, GRPO.loss(policy()))
    with pytest.raises(ArgumentError, match="the next one is 0"), loader.prefetch(3):
        pass
    with pytest.raises(ArgumentError, match="no answers yet"):
        source(GRPO).prefetch(0)


def test_a_rollout_survives_json_to_the_bit() -> None:
    stream = np.random.default_rng(0)
    answers = tuple(
        Answer(tokens=Tokens(ids=tuple(range(n)), start=2), prompt=n, reward=0.1 * n).plus(
            engine=stream.normal(size=n - 2), old=stream.normal(size=n - 2)
        )
        for n in (3, 9, 4)
    )
    for kept in (answers, ()):
        rollout = Rollout(number=7, answers=kept, metrics={"reward_mean": 0.1})
        again = Rollout.from_json(json.loads(json.dumps(rollout.to_json())))
        assert (again.number, again.metrics) == (7, rollout.metrics) and len(again.answers) == len(kept)
        for a, b in zip(again.answers, kept, strict=True):
            assert (a.tokens, a.prompt, a.reward) == (b.tokens, b.prompt, b.reward)
            assert all(np.array_equal(a.columns[name], b.columns[name]) for name in b.columns)


def test_micro_batches_have_one_of_four_sizes() -> None:
    shape = PackShape(tokens=96, segments=8, context=CONTEXT)
    assert [shape.fitting(n) for n in (96, 49, 48, 13, 12, 1)] == [96, 96, 48, 24, 12, 12]


def test_samples_show_the_answers_of_the_last_rollout_with_their_rewards() -> None:
    model = policy()
    loader = rollouts(model, GRPO, GRPO.loss(model))
    assert loader.texts() == []
    taken(loader, 1)
    texts = loader.texts(limit=2)
    assert len(texts) == 2 and all("[reward " in text for text in texts)
    assert Letters().encode(texts[0].splitlines()[0])


class NaNAt(GroupRelativeLoss):
    """NaN at some steps."""

    def __init__(self, config: GroupRelative, model: Transformer, steps: set[int]) -> None:
        super().__init__(config, model)
        self.step, self.at = -1, steps

    def totals(self, batches: Sequence[RolloutBatch]) -> PolicyTotals:
        self.step += 1
        return super().totals(batches)

    def __call__(self, model: Transformer, batch: RolloutBatch, totals: PolicyTotals) -> MicroBatchLoss:
        part = super().__call__(model, batch, totals)
        return part._replace(loss=part.loss * torch.nan) if self.step in self.at else part


def test_after_a_rollback_the_rollout_goes_on_where_it_was(tmp_path: Path) -> None:
    """Steps 3 and 4 are refused: the weights go back to step 2, and the data goes on after the refused steps."""
    objective = replace(GRPO, epochs=3, invariant=False)
    model = policy()
    loss = NaNAt(objective, model, {3, 4})
    loader, notes = rollouts(model, objective, loss), Notes()
    config = replace(CONFIG, steps=6, save_every=2, stability=StabilityConfig(max_skips=2))
    result = fit(config, model, loader, loss=loss, folder=tmp_path, observers=[notes])
    assert result.step == 6 and loader._step == 9, "three updates before, two refused, four after the rollback"
    assert loader._rollouts == 3
    assert [s for s in range(6) if "reward_mean" in notes.rows[s]] == [0, 3]
