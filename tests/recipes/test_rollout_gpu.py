"""Rollouts on a GPU: no second copy of the weights, graphs that outlive updates, and a difference that is logged."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from policy_run import CONTEXT, Letters, Notes, Share, policy, prompts, source

from bagu.nn.model import Transformer
from bagu.recipes.rollout import EngineSampler, engine_config
from bagu.train import OptimizerConfig, TrainConfig, TrainState, fit
from bagu.train.rl.grpo import GroupRelative
from bagu.train.rl.loader import RolloutLoader

pytestmark = pytest.mark.gpu

GRPO = GroupRelative(prompts=4, samples=8, max_tokens=8, epochs=2)


def wide_policy(dtype: torch.dtype = torch.bfloat16) -> Transformer:
    """12M parameters: a copy would be seen in the memory."""
    sizes = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
    return policy(**sizes, intermediate_size=1536).to("cuda", dtype)


def engine_sampler(model: Transformer) -> EngineSampler:
    config = engine_config(answers=32, max_len=CONTEXT, invariant=False)
    return EngineSampler(model, Letters(), replace(config, num_blocks=64, block_size=16))


def test_the_engine_has_no_copy_of_the_weights() -> None:
    model = wide_policy()
    weights = sum(p.nbytes for p in model.parameters())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    own = engine_sampler(model)
    pool = own.engine.runner.kv.num_bytes
    assert own.engine.runner.model is model
    assert torch.cuda.memory_allocated() - before - pool < weights // 8


def test_weights_change_in_place_and_graphs_are_kept() -> None:
    model = wide_policy(torch.float32)  # in bf16 rounding may change a token
    loss = GRPO.loss(model)
    own = engine_sampler(model)
    loader = RolloutLoader(
        source(GRPO), model=model, sampler=own, reward=Share(), learner=loss, decode=Letters().decode
    )  # fmt: skip
    notes = Notes()
    fit(TrainConfig(steps=8, optimizer=OptimizerConfig(lr=1e-3)), model, loader, loss=loss, observers=[notes])
    graphs = own.engine.runner.graphs
    assert graphs is not None and graphs.captured and graphs.reads(model)
    logged = [row["parity_nats"] for row in notes.rows.values() if "parity_nats" in row]  # not of idle steps
    assert logged and all(0 <= parity < float("inf") for parity in logged)
    # the graphs decode with the weights of now: the same answers as an engine that has just been made
    asked, seeds = [p.ids for p in prompts(4)], [0, 1, 2, 3]
    own.weights_changed()
    assert own.engine.runner.graphs is graphs
    found = own.sample(asked, n=4, max_tokens=8, seeds=seeds)
    fresh = engine_sampler(model).sample(asked, n=4, max_tokens=8, seeds=seeds)
    assert [c.tokens for c in found] == [c.tokens for c in fresh]


def test_a_weight_swap_takes_less_than_50_ms() -> None:
    model = wide_policy()
    TrainState(model, TrainConfig())
    own = engine_sampler(model)
    own.sample([(1, 2)], n=8, max_tokens=8, seeds=[0])
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        own.weights_changed()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    assert min(times) < 0.05
