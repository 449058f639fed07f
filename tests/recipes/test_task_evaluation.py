"""Tasks while a model trains, the best checkpoint by their score, and early stopping, by the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bagu.cli import main
from bagu.data.chat_template import DEFAULT_TEMPLATE
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import ArgumentError
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.recipes.models import load_model, save_model
from bagu.recipes.run import load_run
from bagu.recipes.training import train
from bagu.runs.folder import RunFolder
from bagu.train import checkpoint
from bagu.train.best import Best, BestConfig
from bagu.train.cross_entropy import CrossEntropy

MODEL = ModelConfig(
    vocab_size=262, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48,
    max_len=64,
)  # fmt: skip
SMALL = [
    "device=cpu", "dtype=fp32", "validation=0.25", "data.context=40", "data.rows=2", "data.micro_batches=1",
    "train.steps=4", "train.eval_every=2", "train.save_every=2", "train.sample_every=null", "train.compile=false",
    "train.keep_best=true",
]  # fmt: skip
TASK = """
name = "colours"
kind = "choice"
data = "items.jsonl"
prompt = "The sky is"
choices = "{{ choices }}"
answer = "{{ label }}"
"""
SCORE = "task_colours_accuracy_percent"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model to start from, a task, and data of every kind."""
    tokenizer = BpeTokenizer.train(["Say something nice."], vocab_size=262, chat_template=DEFAULT_TEMPLATE)
    save_model(init_weights(Transformer(MODEL, dtype=torch.float32), seed=1), tokenizer, tmp_path / "start")
    rows: dict[str, list[dict[str, Any]]] = {
        "items": [{"choices": ["blue", f"a{i}"], "label": i % 2} for i in range(6)],
        "text": [{"text": f"The sky is blue, {i}. " * 8} for i in range(8)],
        "prompts": [{"prompt": f"Say {i}"} for i in range(8)],
        "pairs": [{"prompt": f"Say {i}", "chosen": "yes", "rejected": "no"} for i in range(8)],
        "chats": [
            {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": "yes"}]}
            for i in range(8)
        ],
    }
    for name, values in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values))
    (tmp_path / "colours.toml").write_text(TASK)
    (tmp_path / "mine.py").write_text("def score(prompt, completion, facts):\n    return len(set(completion))\n")
    return tmp_path


def bagu(folder: Path, data: str, recipe: str, *settings: str, args: tuple[str, ...] = ()) -> int:
    """Exit status of `bagu train`."""
    sets = [part for s in (*SMALL, "dedup=null", *settings) for part in ("--set", s)]
    with pytest.raises(SystemExit) as end:
        main(["train", str(folder / f"{data}.jsonl"), "--recipe", recipe, "--from", str(folder / "start"),
              "--out", str(folder / "run"), *sets, *args])  # fmt: skip
    return int(end.value.code or 0)


def tasks(folder: Path) -> str:
    return f'eval_tasks=["{folder}/colours.toml"]'


GRPO = ("objective.prompts=4", "objective.samples=3", "objective.max_tokens=4")


@pytest.mark.parametrize(
    "data,recipe,settings,args",
    [
        ("text", "small", (), ()), ("chats", "sft", (), ()), ("pairs", "dpo", (), ()),
        ("prompts", "grpo", GRPO, ("--reward", "mine.py:score")),
    ],
)  # fmt: skip
def test_every_objective_evaluates_tasks(
    folder: Path, data: str, recipe: str, settings: tuple[str, ...], args: tuple[str, ...],
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    assert bagu(folder, data, recipe, tasks(folder), f"train.best.metric={SCORE}", *settings, args=args) == 0
    rows = RunFolder(folder / "run").metrics()
    scored = [row for row in rows if SCORE in row]
    assert [row["step"] for row in scored] == [1, 3] and all(0 <= row[SCORE] <= 100 for row in scored)
    assert (
        checkpoint.state_of(checkpoint.checkpoints(folder / "run/checkpoints")[-1])["validation_loss"]
        == -scored[-1][SCORE]
    )
    assert "colours" in capsys.readouterr().err
    assert "Task colours accuracy" in (folder / "run/report.html").read_text()


def test_a_run_without_improvement_ends_with_its_best_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The highest loss is asked for: the first evaluation stays the best, and three more end the run."""
    settings = (
        tasks(folder), "train.steps=40", "train.best.metric=val_loss_nats", "train.best.patience=3",
        "train.best.load_at_end=true", "train.best.greater_is_better=true", "train.optimizer.lr=0.01",
        "train.keep_last=1",
    )  # fmt: skip
    assert bagu(folder, "text", "small", *settings) == 0
    assert "done after 8 of 40 steps: val_loss_nats was best at step 2" in " ".join(capsys.readouterr().err.split())
    run = RunFolder(folder / "run")
    (event,) = (e for e in run.events() if e["kind"] == "ended_early")
    assert event["best_step"] == 2 and event["evaluations_since"] == 3
    kept = [checkpoint.state_of(path)["step"] for path in checkpoint.checkpoints(run.checkpoints)]
    assert kept == [2, 8]
    saved = checkpoint.load_model_tensors(checkpoint.path_of(run.checkpoints, 2))
    ended = load_model(folder / "run/model").state_dict()
    assert all(torch.equal(ended[name], value) for name, value in saved.items())


@pytest.mark.slow
def test_early_stopping_resumes_exactly(folder: Path) -> None:
    settings = (tasks(folder), "train.steps=40", f"train.best.metric={SCORE}", "train.best.patience=2")
    assert bagu(folder, "text", "small", *settings) == 0
    whole = RunFolder(folder / "run")
    run = load_run(whole.config_path)
    for pause in (3, 5, 40):
        done = train(run, folder / "again", resume=pause > 3, pause_after=pause)
    assert done.fit.step == whole.metrics()[-1]["step"] + 1 < 40
    keys = ("step", "loss_nats", "val_loss_nats", SCORE)
    rows = [[{k: row.get(k) for k in keys} for row in r.metrics()] for r in (whole, RunFolder(folder / "again"))]
    assert rows[0] == rows[1]
    assert train(run, folder / "again", resume=True).fit.step == done.fit.step  # it stays ended


@pytest.mark.parametrize(
    "data,recipe,settings,said",
    [
        ("text", "small", ('eval_tasks=["continu4"]',), "continue4"),
        ("text", "small", ('eval_tasks=["recall"]', "train.eval_every=null", "train.keep_best=false"), "eval_every"),
        ("pairs", "reward", ('eval_tasks=["recall"]',), "score head"),
        ("text", "small", ('eval_tasks=["recall","recall"]',), "two tasks"),
        ("text", "small", ('eval_tasks=["recall"]', "train.best.metric=task_recal_accuracy_percent"), "task_recall_"),
        ("text", "small", ("train.best.load_at_end=true", "train.keep_best=false"), "keep_best"),
        ("text", "small", ("train.best.patience=0",), "at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_refused_before_training(
    folder: Path, data: str, recipe: str, settings: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bagu(folder, data, recipe, *settings) == 2
    assert said in capsys.readouterr().err
    assert not (folder / "run").exists()


def test_the_best_is_the_lowest_loss_or_the_highest_score() -> None:
    best = Best(BestConfig(metric="task_a_accuracy_percent", patience=2, threshold=1.0), CrossEntropy())
    for step, value in enumerate((40.0, 40.5, 43.0, 43.5, 44.0)):
        best.evaluated({"task_a_accuracy_percent": value}, step)
        assert (best.ended is None) == (step < 4)
    assert best.ended == {"metric": "task_a_accuracy_percent", "best": 43.0, "best_step": 2, "evaluations_since": 2}
    assert Best(BestConfig(), CrossEntropy()).score_of({"val_loss_nats": 2.0}) == 2.0
    assert Best(BestConfig(metric="val_loss_nats"), CrossEntropy()).score_of({"val_loss_nats": 2.0}) == 2.0
    assert (
        Best(BestConfig(metric="val_x_percent", greater_is_better=False), CrossEntropy()).score_of({"val_x_percent": 2})
        == 2
    )
    with pytest.raises(ArgumentError, match="no such metric"):
        best.evaluated({"val_loss_nats": 1.0}, 9)
