"""`bagu train --recipe on_policy_distill`: a student learns its teacher's distributions on its own answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bagu.cli import main
from bagu.config import override
from bagu.data.chat_template import DEFAULT_TEMPLATE
from bagu.data.tokenizer import BpeTokenizer
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.recipes.catalogue import recipe, with_data, with_start
from bagu.recipes.models import save_model
from bagu.recipes.run import Run
from bagu.recipes.training import train
from bagu.runs.folder import RunFolder

MODEL = ModelConfig(
    vocab_size=262, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48,
    max_len=64,
)  # fmt: skip


def saved(folder: Path, seed: int, *, constant: bool = False) -> Path:
    """A model of random weights in a folder; with `constant` it says the same after every text."""
    model = init_weights(Transformer(MODEL, dtype=torch.float32), seed)
    if constant:
        with torch.no_grad():
            model.embedding.weight.copy_(model.embedding.weight[:1].expand_as(model.embedding.weight))
            model.head_weight.mul_(20)
    save_model(model, BpeTokenizer.train(["abc"], vocab_size=262, chat_template=DEFAULT_TEMPLATE), folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(16)))
    student, teacher = saved(tmp_path / "student", 1), saved(tmp_path / "teacher", 2, constant=True)
    plain = with_start(with_data(recipe("on_policy_distill"), [str(prompts)]), str(student))
    return override(
        plain,
        [f"objective.teacher={teacher}", "objective.divergence=forward", "objective.prompts=4", "objective.samples=4",
         "objective.max_tokens=4", "data.context=64", "data.rows=2", "dtype=fp32", "device=cpu", "validation=0.3",
         "train.steps=10", "train.eval_every=10", "train.save_every=5", "train.sample_every=10",
         "train.optimizer.lr=0.03"],
    )  # fmt: skip


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics without what the machine decides."""
    left_out = ("mfu_percent", "memory_bytes")
    return [
        {k: v for k, v in row.items() if k not in left_out and not k.endswith(("_s", "_per_s"))}
        for row in RunFolder(folder).metrics()
    ]


def test_a_student_learns_on_its_own_answers_and_resumes_to_the_same_bits(run: Run, tmp_path: Path) -> None:
    whole = train(run, tmp_path / "whole")
    rows = rows_of(tmp_path / "whole")
    assert rows[-1]["val_divergence_nats"] < 0.05 * rows[0]["divergence_nats"]
    assert not any("reward" in name or "loss_nats" in name for row in rows for name in row)
    train(run, tmp_path / "run", pause_after=5)
    ended = train(run, tmp_path / "run", resume=True)
    assert rows_of(tmp_path / "run") == rows
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, ended.model.state_dict()[name]), name


def test_the_command_says_what_is_missing(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for setting, said in (
        ("objective.prompts=0", "objective.prompts is 0"),
        ("objective.max_tokens=300", "no room for a prompt"),
        ("data.micro_batches=2", "has no effect on rollouts"),
        ("objective.teacher=", "needs a teacher"),
    ):
        given = ("data.context=64", "objective.max_tokens=8", f"objective.teacher={tmp_path / 'teacher'}", setting)
        sets = [part for s in given for part in ("--set", s)]
        start = ["--recipe", "on_policy_distill", "--from", tmp_path / "student", "--out", tmp_path / "no"]
        with pytest.raises(SystemExit) as end:
            main([str(a) for a in ("train", tmp_path / "prompts.jsonl", *start, *sets)])
        assert end.value.code == 2 and said in capsys.readouterr().err
