"""GRPO and PPO by the command: prompts from a file, the reward of a user, report, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from bagu.cli import main
from bagu.data.chat_template import DEFAULT_TEMPLATE
from bagu.data.tokenizer import BpeTokenizer
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.nn.score import with_score_head
from bagu.recipes.models import load_model, save_model
from bagu.runs.folder import RunFolder
from bagu.train import checkpoint

MODEL = ModelConfig(
    vocab_size=262, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48,
    max_len=48,
)  # fmt: skip
REWARD = """
def score(prompt, completion, facts):
    assert prompt.startswith("Say") and facts["n"] in range(12)
    if facts["n"] == 3:
        raise ValueError("no")
    return sum(c.isascii() for c in completion) / 8
"""
SMALL = [
    "device=cpu", "dtype=fp32", "validation=0.25", "data.context=40", "data.rows=2", "objective.prompts=4",
    "objective.samples=3", "objective.max_tokens=6", "train.steps=3", "train.eval_every=3", "train.sample_every=2",
    "train.save_every=3", "train.keep_best=true", "train.optimizer.lr=0.01",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model to start from, twelve prompts and a reward."""
    tokenizer = BpeTokenizer.train(["Say something nice."], vocab_size=262, chat_template=DEFAULT_TEMPLATE)
    save_model(init_weights(Transformer(MODEL, dtype=torch.float32), seed=1), tokenizer, tmp_path / "start")
    rows = [{"prompt": f"Say {i}", "n": i} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(REWARD)
    return tmp_path


def bagu(
    folder: Path, recipe: str, *args: str, settings: list[str] = SMALL, reward: str | None = "mine.py:score"
) -> int:
    """Exit status of `bagu train`."""
    given = [] if reward is None else ["--reward", str(folder / reward)]
    sets = [part for s in settings for part in ("--set", s)]
    with pytest.raises(SystemExit) as end:
        main(["train", str(folder / "prompts.jsonl"), "--recipe", recipe, "--from", str(folder / "start"),
              "--out", str(folder / "run"), *given, *sets, *args])  # fmt: skip
    return int(end.value.code or 0)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return RunFolder(folder).metrics()


def test_grpo_by_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bagu(folder, "grpo", "--dry-run") == 0
    said = capsys.readouterr().err
    assert "prompts: 8 documents" in said and "3 steps of 170 tokens" in said and not (folder / "run").exists()
    with pytest.warns(RuntimeWarning, match="raised ValueError"):
        assert bagu(folder, "grpo") == 0
    assert "grpo 3/3 steps, reward " in capsys.readouterr().err
    rows = rows_of(folder / "run")
    assert len(rows) == 3 and sum(row["reward_faults"] for row in rows) % 3 == 0
    for row in rows:
        assert row["rollout_s"] > 0 and row["reward_s"] > 0 and row["update_s"] > 0 and row["parity_nats"] < 2**-13
        assert 0 <= row["clip_share_percent"] <= 100 and row["length_tokens"] <= 6 and row["entropy_nats"] > 1
    assert rows[-1]["val_reward_mean"] is not None
    last = checkpoint.state_of(checkpoint.checkpoints(folder / "run" / "checkpoints")[-1])
    assert last["validation_loss"] == -rows[-1]["val_reward_mean"] and last["cursor"]["rollouts"] == 3
    samples = RunFolder(folder / "run").samples()
    assert samples and all("Say" in text and "[reward" in text for texts in samples.values() for text in texts)
    page = RunFolder(folder / "run").report.read_text()
    for title in ("Reward", "Entropy", "Length of answers", "Ratio", "Time by phase", "Throughput by phase"):
        assert f"<h3>{title}</h3>" in page or title in page, title
    trained = load_model(folder / "run")
    assert not torch.equal(trained.embedding.weight, load_model(folder / "start").embedding.weight)


def test_ppo_by_the_command_and_resumed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The critic is in the checkpoints of the run, and not in its model."""
    settings = [*SMALL, "objective.samples=1", "objective.epochs=1", "train.steps=2", "train.save_every=1",
                "train.eval_every=null", "train.keep_best=false", "train.sample_every=null"]  # fmt: skip
    with pytest.warns(RuntimeWarning):
        assert bagu(folder, "ppo", settings=settings) == 0
    with pytest.raises(SystemExit) as end:
        main(["train", "--resume", "--out", str(folder / "run"), "--set", "train.steps=3"])
    assert end.value.code in (0, None)
    rows = rows_of(folder / "run")
    assert len(rows) == 3 and all("value_loss" in row and "kl_nats" in row for row in rows)
    assert "<h3>Value loss</h3>" in RunFolder(folder / "run").report.read_text()
    saved = checkpoint.checkpoints(folder / "run" / "checkpoints")[-1]
    with safe_open(saved / checkpoint.MODEL, framework="pt") as file:
        assert any(name.startswith("critic.") for name in file.keys())  # noqa: SIM118
    for place in (saved, folder / "run"):
        loaded = load_model(place)
        assert loaded.score is None and not any("critic" in name for name in loaded.state_dict())


@pytest.mark.parametrize(
    ("recipe", "body", "said"),
    [
        ("grpo", "return 1.0", "in all 2 steps the reward was equal for the answers to each prompt"),
        ("grpo", "raise ValueError('no')", "the reward failed for all 96 answers: it raised ValueError"),
        ("ppo", "raise ValueError('no')", "the reward failed for all 8 answers: it raised ValueError"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*raised ValueError")
def test_a_run_that_learns_nothing_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str], recipe: str, body: str, said: str
) -> None:
    """It ended with "done", status 0 and the bytes of the start."""
    (folder / "mine.py").write_text(f"def score(prompt, completion, facts):\n    {body}\n")
    settings = [*SMALL, "train.steps=2", "train.eval_every=null", "train.keep_best=false", "train.sample_every=null"]
    if recipe == "ppo":
        settings += ["objective.samples=1", "objective.epochs=1", "objective.minibatches=1"]
    assert bagu(folder, recipe, settings=settings) == 3
    err = capsys.readouterr().err
    assert f"done, and nothing was learned: {said}" in " ".join(err.split())
    events = [e for e in RunFolder(folder / "run").events() if e["kind"] == "no_update"]
    assert len(events) == (recipe == "grpo") and ("step 0: no update" in err) == (recipe == "grpo")


def test_a_reward_model_is_the_reward_and_the_start_of_the_critic(folder: Path) -> None:
    scorer = with_score_head(load_model(folder / "start"))
    torch.nn.init.normal_(scorer.score.weight, std=0.5, generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr]
    save_model(scorer, BpeTokenizer.load(folder / "start"), folder / "scorer")
    settings = [*SMALL, "objective.samples=1", "objective.epochs=1", "objective.minibatches=1", "train.steps=1",
                "train.save_every=1", "train.eval_every=null", "train.keep_best=false", "train.sample_every=null",
                "train.optimizer.lr=1e-9"]  # fmt: skip
    assert bagu(folder, "ppo", settings=settings, reward="scorer") == 0
    (row,) = rows_of(folder / "run")
    assert row["reward_mean"] != 0 and row["reward_faults"] == 0
    saved = checkpoint.checkpoints(folder / "run" / "checkpoints")[-1]
    with safe_open(saved / checkpoint.MODEL, framework="pt") as file:
        weight = file.get_tensor("critic.score.weight")
    torch.testing.assert_close(weight, scorer.score.weight.detach(), atol=1e-8, rtol=0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changes,args,reward,said",
    [
        ([], [], None, "needs a reward"),
        ([], [], "nothing.py:score", "there is no Python file"),
        (["objective.max_tokens=40"], [], "mine.py", "no room for a prompt"),
        (["data.micro_batches=2"], [], "mine.py", "has no effect on rollouts"),
        (["data.packing=whole"], [], "mine.py", "data.packing is set, and has no effect on rollouts"),
        (
            ['data.mix.schedule=[{"step": 0, "weights": {"a": 1}}]'],
            [],
            "mine.py",
            "data.mix.schedule is set, and has no effect on rollouts",
        ),
        ([], ["--prompt", "a"], "mine.py", "its own prompts"),
        (["objective.max_tokens=39"], [], "mine.py", "no prompt fits in 1 tokens"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], changes: list[str], args: list[str], reward: str | None, said: str
) -> None:
    assert bagu(folder, "grpo", *args, settings=[*SMALL, *changes], reward=reward) == 2
    assert said in capsys.readouterr().err and not (folder / "run").exists()
    assert bagu(folder, "grpo", "--dry-run", *args, settings=[*SMALL, *changes], reward=reward) == 2


def test_ppo_without_a_reward_asks_for_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not for a critic: Path("") is the working folder, which is no reward model."""
    assert bagu(folder, "ppo", "--dry-run", settings=SMALL, reward=None) == 2
    assert "objective 'ppo' needs a reward" in capsys.readouterr().err


def test_a_reward_is_refused_for_an_objective_without_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bagu(folder, "sft", settings=[]) == 2
    assert "'sft' has no reward" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_several_rewards_are_summed_with_their_weights_and_logged_apart(folder: Path, recipe: str) -> None:
    (folder / "short.py").write_text(
        "def score(prompt, completion, facts):\n    return -len(completion)\n"
        "def broken(prompts, completions, facts):\n    raise OSError('no disk')\n"
    )
    with pytest.warns(RuntimeWarning, match=r"short\.py:broken raised OSError: no disk"):
        given = ("--reward", f"{folder}/short.py:score:0.25", "--reward", f"{folder}/short.py:broken:2")
        assert bagu(folder, recipe, *given) == 0
    rows = RunFolder(folder / "run").metrics()
    parts = ("mine.py:score", "short.py:score", "short.py:broken")
    first = [row for row in rows if "reward_mean" in row]
    assert first
    for row in first:
        mine, short, broken = (row[f"reward_part_{name}"] for name in parts)
        assert broken == 0 and short < 0 < mine
        assert row["reward_mean"] == pytest.approx(mine + 0.25 * short)
    assert rows[-1]["val_reward_part_short.py:score"] < 0
    page = (folder / "run" / "report.html").read_text()
    assert "Reward short.py:score" in page and "before its weight, 0.25" in page


def test_weights_of_rewards_are_read_from_the_end(tmp_path: Path) -> None:
    from bagu.config import ConfigError
    from bagu.train.rl.reward_function import reward_specs

    found = reward_specs(["python", "a/f.py:0.2", "f.py:other:-1e-2", "runs/scorer:0"])
    assert [(r.spec, r.weight, r.name) for r in found] == [
        ("python", 1, "python"), ("a/f.py", 0.2, "f.py"), ("f.py:other", -0.01, "f.py:other"),
        ("runs/scorer", 0, "scorer"),
    ]  # fmt: skip
    (tmp_path / "model:2").mkdir()
    assert reward_specs(str(tmp_path / "model:2"))[0].weight == 1  # the name of a folder
    with pytest.raises(ConfigError, match=r"two rewards have the name 'f\.py:score'"):
        reward_specs(["a/f.py:score", "b/f.py:score:2"])
