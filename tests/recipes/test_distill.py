"""`bagu train --recipe distill`: a student learns a teacher's distributions, resumes to the same bits, and a teacher
that does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from bagu.config import override
from bagu.data.chat_template import DEFAULT_TEMPLATE
from bagu.data.tokenizer import BpeTokenizer
from bagu.nn.config import ModelConfig, MoEConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.recipes.catalogue import recipe, with_data, with_start
from bagu.recipes.models import load_model, save_model
from bagu.recipes.run import Run
from bagu.recipes.training import train
from bagu.runs.folder import RunFolder
from bagu.train import checkpoint
from bagu.train.checkpoint import CheckpointError
from bagu.train.objectives.distillation import DistillationLoss
from bagu.types import IGNORE
from tests.command import bagu

pytestmark = pytest.mark.usefixtures("own_cache")

SHAPE: dict[str, Any] = {
    "vocab_size": 262, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "max_len": 32,
}  # fmt: skip
SETTINGS = [
    "data.context=32", "data.rows=4", "dtype=fp32", "device=cpu", "validation=0.3", "dedup=null", "eval_batches=2",
    "train.optimizer.lr=0.01", "train.steps=6", "train.eval_every=3", "train.save_every=2", "train.keep_last=9",
]  # fmt: skip


def saved(folder: Path, seed: int, *, louder: float = 1.0, **changes: Any) -> Path:
    """A model of random weights in a folder, with a tokenizer of bytes. `louder` makes its distributions sharper."""
    model = init_weights(Transformer(ModelConfig(**SHAPE | changes), dtype=torch.float32), seed)
    with torch.no_grad():
        model.head_weight.mul_(louder)
    save_model(model, BpeTokenizer.train(["abc"], vocab_size=262, chat_template=DEFAULT_TEMPLATE), folder)
    return folder


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """A student, and a teacher with wider layers and sharper distributions."""
    teacher = saved(tmp_path / "teacher", 1, louder=20.0, hidden_size=48, intermediate_size=64)
    return saved(tmp_path / "student", 2), teacher


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Files of four letters in another order each."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i}.txt").write_text("".join("abcd"[(i * j + j * j // 7) % 4] for j in range(120)))
    return folder


@pytest.fixture
def run(models: tuple[Path, Path], texts: Path) -> Run:
    student, teacher = models
    plain = with_start(with_data(recipe("distill"), [str(texts)]), str(student))
    return override(plain, [*SETTINGS, f"objective.teacher={teacher}"])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics without what the machine decides."""
    left_out = ("tokens_per_s", "memory_bytes", "data_wait_s", "mfu_percent")
    return [{k: v for k, v in row.items() if k not in left_out} for row in RunFolder(folder).metrics()]


def test_a_student_learns_its_teachers_distributions(run: Run, tmp_path: Path) -> None:
    """Far below the divergence of the best student that predicts the same for every context."""
    run = override(run, ["train.steps=60", "train.eval_every=60", "train.save_every=null"])
    done = train(run, tmp_path / "run")
    teacher, batches = load_model(tmp_path / "teacher"), list(done.data.held_out(2))
    with torch.no_grad():
        hidden = [teacher(b.ids, b.positions, b.cu_seqlens, b.max_len).hidden for b in batches]
        p = torch.cat([teacher.logits(h) for h in hidden]).double().softmax(1)
    constant = float((p * (p.log() - p.mean(0).log())).sum(1).mean())
    rows = rows_of(tmp_path / "run")
    assert rows[0]["divergence_nats"] > constant > 0.1
    assert rows[-1]["val_divergence_nats"] < constant / 10
    assert "loss_nats" not in rows[0] and rows[-1]["val_loss_nats"] > 0


def test_the_loss_of_a_micro_batch_is_the_sum_of_its_parts(run: Run, tmp_path: Path) -> None:
    """temperature² times the divergence, plus weighted cross-entropy and the balance loss, over two micro-batches."""
    teacher = load_model(tmp_path / "teacher")
    moe = MoEConfig(num_experts=4, top_k=2, expert_size=16, aux_weight=0.1)
    student = init_weights(Transformer(ModelConfig(**SHAPE | {"moe": moe}), dtype=torch.float32), 3)
    loss = DistillationLoss(teacher, "forward", beta=0.5, temperature=2.0, cross_entropy=0.25)
    batches = train(override(run, ["train.steps=1", "data.micro_batches=2"]), tmp_path / "run").data.loader.batch(0)
    totals, want = loss.totals(batches), 0.0
    parts = [loss(student, batch, totals) for batch in batches]
    for batch in batches:
        inputs = batch.ids, batch.positions, batch.cu_seqlens, batch.max_len
        with torch.no_grad():
            out = student(*inputs)
            s, t = student.logits(out.hidden).double(), teacher.logits(teacher(*inputs).hidden).double()
        p, q = (x.div(2).log_softmax(1) for x in (t, s))
        kl = (p.exp() * (p - q)).sum(1)[batch.targets != IGNORE].sum()
        ce = torch.nn.functional.cross_entropy(s, batch.targets, reduction="sum")
        want += float(4 * kl + 0.25 * ce) / totals.targets + float(out.aux_loss) / 2
    assert len(parts[0].expert_load) == 1
    assert sum(float(p.loss.detach()) for p in parts) == pytest.approx(want, rel=262 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(
    "lora", [pytest.param((), marks=pytest.mark.slow), ("lora.rank=4", "lora.base=int8")], ids=["weights", "int8_lora"]
)
def test_it_resumes_to_the_same_bits_and_keeps_the_teacher_out_of_checkpoints(
    lora: tuple[str, ...], run: Run, tmp_path: Path
) -> None:
    run = override(run, [*lora, "objective.divergence=jsd", "objective.cross_entropy=0.5"])
    whole = train(run, tmp_path / "whole")
    train(run, tmp_path / "run", pause_after=3)
    ended = train(run, tmp_path / "run", resume=True)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, ended.model.state_dict()[name]), name
    last = checkpoint.checkpoints(tmp_path / "run" / "checkpoints")[-1]
    with safe_open(last / checkpoint.MODEL, framework="pt") as file:
        assert len(file.keys()) == (8 if lora else len(list(whole.model.parameters())))
    saved(tmp_path / "teacher", 5, louder=20.0, hidden_size=48, intermediate_size=64)  # another model, the same path
    with pytest.raises(CheckpointError, match="the teacher of this run is"):
        train(override(run, ["train.steps=8"]), tmp_path / "run", resume=True)


def test_the_command_takes_chats_and_reports_the_divergence(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "so"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(8)))
    student, teacher = models
    named = ["objective.data=chats", f"objective.teacher={teacher}", "data.context=32", "data.rows=2", "dtype=fp32"]
    sets = [part for s in (*named, "train.steps=2", "validation=0.3", "device=cpu") for part in ("--set", s)]
    out = tmp_path / "run"
    assert bagu("train", tmp_path / "chats.jsonl", "--recipe", "distill", "--from", student, "--out", out, *sets) == 0
    said = capsys.readouterr().err
    assert "teacher   " in said and "parameters, frozen" in said and "steps, divergence" in said
    assert "KL(teacher‖student)" in RunFolder(out).report.read_text()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("teacher=", "objective 'distill' needs a teacher, and objective.teacher is empty"),
        ("beta=0.1", "beta is 0.1, and divergence 'forward' has none"),
        ("temperature=0", "temperature is 0"),
        ("cross_entropy=-1", "cross_entropy is -1"),
        ("teacher=WIDER", "the teacher has a vocabulary of 300 and the student of 262"),
        ("teacher=OTHER", "has another tokenizer than the trained model"),
        ("teacher=SHORT", "has positions for 16"),
        ("teacher=ENCODER", "sees both sides"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(
    setting: str, said: str, models: tuple[Path, Path], texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = setting.removeprefix("teacher=")
    changes = {"WIDER": {"vocab_size": 300}, "SHORT": {"max_len": 16}, "ENCODER": {"causal": False}}
    if name in changes:
        setting = f"teacher={saved(tmp_path / 'misfit', 1, **changes[name])}"
    if name == "OTHER":
        setting = f"teacher={saved(tmp_path / 'misfit', 1)}"
        BpeTokenizer.train(["zyx zyx zyx"], vocab_size=263).save(tmp_path / "misfit")
    sets = [
        part for s in (*SETTINGS, f"objective.teacher={models[1]}", f"objective.{setting}") for part in ("--set", s)
    ]
    start = ["--recipe", "distill", "--from", models[0], "--out", tmp_path / "run"]
    assert bagu("train", texts, *start, *sets) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
