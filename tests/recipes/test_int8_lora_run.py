"""`lora.base=int8`: a run trains adapters over int8 weights, resumes to the same bits, and leaves the merged model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from policy_run import policy, rollouts

from bagu.config import override
from bagu.data.chat_template import DEFAULT_TEMPLATE
from bagu.data.corpus import SourceConfig
from bagu.data.loader import DataConfig
from bagu.data.tokenizer import BpeTokenizer
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.linear import Linear
from bagu.nn.lora import add_lora, lora_state, merge
from bagu.nn.model import Transformer
from bagu.nn.peft import load_adapter
from bagu.recipes.catalogue import recipe, with_data, with_start
from bagu.recipes.models import load_model, save_model
from bagu.recipes.run import Run
from bagu.recipes.training import train
from bagu.runs.folder import RunFolder
from bagu.train import OptimizerConfig, TrainConfig, TrainState, step
from bagu.train.preference.dpo import PreferenceOptimization
from bagu.train.preference.reward import RewardModelling
from bagu.train.rl.grpo import GroupRelative

pytestmark = pytest.mark.usefixtures("own_cache")

MODEL = ModelConfig(
    vocab_size=262, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48,
    max_len=32,
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Run:
    tokenizer = BpeTokenizer.train(["abc"], vocab_size=262, chat_template=DEFAULT_TEMPLATE)
    save_model(init_weights(Transformer(MODEL, dtype=torch.float32), 1), tokenizer, tmp_path / "base")
    chats = [
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}{i}"}] for i in range(12)
    ]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in chats))
    plain = with_start(with_data(recipe("lora"), [str(tmp_path / "chats.jsonl")]), str(tmp_path / "base"))
    return override(
        plain,
        ["lora.base=int8", "lora.rank=2", "data.context=32", "data.rows=4", "data.micro_batches=2", "dtype=fp32",
         "device=cpu", "validation=0.3", "train.steps=4", "train.eval_every=2", "train.save_every=2"],
    )  # fmt: skip


def test_it_leaves_the_dequantized_weights_with_the_adapter_added(run: Run, tmp_path: Path) -> None:
    train(run, tmp_path / "run")
    base = load_model(tmp_path / "base")
    for linear in base.modules():
        if isinstance(linear, Linear):
            linear.quantize()
    load_adapter(base, tmp_path / "run" / "adapter")
    merge(base)
    trained, plain = load_model(tmp_path / "run"), load_model(tmp_path / "base")
    for name, weight in trained.state_dict().items():
        assert weight.dtype == torch.float32 and torch.equal(weight, base.state_dict()[name]), name
    assert not torch.equal(trained.blocks[0].attention.qkv.weight, plain.blocks[0].attention.qkv.weight)


def test_it_resumes_to_the_same_bits(run: Run, tmp_path: Path) -> None:
    whole = train(run, tmp_path / "whole")
    train(run, tmp_path / "run", pause_after=2)
    ended = train(run, tmp_path / "run", resume=True)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, ended.model.state_dict()[name]), name


@pytest.mark.parametrize("objective", ["reward", "dpo"])
def test_preferences_are_learned_over_an_int8_base(run: Run, tmp_path: Path, objective: str) -> None:
    """The reference of DPO is the int8 base without the adapters, so the loss starts at ln 2 here too."""
    rows = [{"prompt": f"{i}?", "chosen": f"{i} please", "rejected": f"{i} go off"} for i in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = {"reward": RewardModelling(), "dpo": PreferenceOptimization(beta=0.5, reference="live")}[objective]
    sources = {"pairs": SourceConfig(path=str(tmp_path / "pairs.jsonl"))}
    pairs = replace(run, objective=kind, sources=sources, data=DataConfig(context=32, rows=4))
    done = train(override(pairs, ["train.steps=8", "train.optimizer.lr=0.01"]), tmp_path / "run")
    metrics = RunFolder(tmp_path / "run").metrics()
    assert metrics[0]["preference_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert metrics[-1]["val_preference_loss"] < 0.8 * math.log(2)
    again = load_model(tmp_path / "run").state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in done.model.state_dict().items())


@pytest.mark.parametrize("invariant", [True, False])
def test_the_engine_samples_with_int8_weights_and_adapters(invariant: bool) -> None:
    """GRPO over an int8 base: in invariant mode the trainer has the bits of the engine, else nearly."""
    objective = GroupRelative(prompts=3, samples=4, max_tokens=5, invariant=invariant, kl=0.1)
    model = policy()
    add_lora(model, rank=2, alpha=4.0, base="int8")
    with torch.no_grad():
        for pair in lora_state(model).values():
            pair.copy_(torch.randn(pair.shape, generator=torch.Generator().manual_seed(pair.numel())))
    loss = objective.loss(model)
    state = TrainState(model, TrainConfig(steps=4, optimizer=OptimizerConfig(lr=0.02)), loss)
    with rollouts(model, objective, loss).prefetch(0) as steps:
        for _ in range(2):
            metrics = step(state, next(steps)).metrics
            bound = 0.0 if invariant else 64 * torch.finfo(torch.float32).eps
            assert metrics["parity_nats"] <= bound and metrics["kl_nats"] > 0
