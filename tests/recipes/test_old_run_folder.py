"""A run folder of the older layout (`stage`, `mask_rate`, `train.z_loss`: commit 04aff00) resumes, reports, serves and
exports."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bagu.config import from_dict
from bagu.errors import BaguError
from bagu.recipes.evaluate import training_texts
from bagu.recipes.find import find_model
from bagu.recipes.models import load_model
from bagu.recipes.run import Run, load_run
from bagu.recipes.serve import Loader
from bagu.recipes.training import train
from bagu.runs.folder import RunFolder
from bagu.train import checkpoint
from bagu.train.objectives.language_modelling import LanguageModelling
from bagu.train.objectives.masked import MaskedLanguageModelling
from bagu.train.objectives.sft import SupervisedFineTuning
from bagu.train.report import display_of, read_run
from bagu.train.upgrade import upgrade_checkpoint, upgrade_run
from tests.command import bagu

pytestmark = pytest.mark.usefixtures("own_cache")

# config.json as 04aff00 wrote it, key by key
OLD: dict[str, Any] = {
    "stage": "pretrain",
    "sources": {"texts": {"path": "texts", "field": None, "glob": None, "max_bytes": None}},
    "tokenizer": {"path": None, "vocab_size": 300, "max_mb": 64.0},
    "data": {
        "context": 32, "rows": 4, "micro_batches": 1, "seed": 0, "packing": "stream", "max_segments_per_row": None,
        "mix": {"weights": None, "temperature": 1.0, "schedule": []},
    },
    "train": {
        "steps": 6, "seed": 0,
        "optimizer": {
            "kind": "adamw", "lr": 0.007, "weight_decay": None, "momentum": None, "betas": None, "eps": None,
            "rho": None, "newton_schulz_steps": None,
        },
        "schedule": {"kind": "wsd", "warmup_steps": 3, "final": None, "decay_share": 0.5},
        "stability": {"spike_threshold": 8.0, "window": 128, "min_history": 32, "max_skips": 5, "max_rollbacks": 3},
        "clip": 1.0, "z_loss": 0.001, "compile": False, "activation_checkpointing": "none", "deterministic": False,
        "eval_every": 2, "sample_every": None, "save_every": 2, "keep_last": 2, "keep_best": True,
    },
    "model": {
        "vocab_size": 300, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16,
        "intermediate_size": 64, "max_len": 32,
        "norm": {"kind": "rms", "placement": "pre", "eps": 1e-06, "bias": False, "groups": None, "alpha": None},
        "positions": {"kind": "rope", "base": 10000.0, "dim": None, "layout": "half", "scaling": None},
        "attention": "softmax", "mla": None, "causal": True, "windows": [None], "qk_norm": False, "qkv_bias": False,
        "out_bias": False, "ffn": "swiglu", "ffn_bias": False, "moe": None, "weight_norm": False, "dropout": 0.0,
        "tie_embeddings": True, "embedding_norm": False, "num_token_types": 0, "mlm_head": False, "init_std": 0.02,
    },
    "init_from": None, "lora": None, "mask_rate": None, "dtype": "fp32", "device": None, "validation": 0.3,
    "dedup": None, "eval_batches": 2,
}  # fmt: skip


def old_config(texts: Path) -> dict[str, Any]:
    return OLD | {"sources": {"texts": OLD["sources"]["texts"] | {"path": str(texts)}}}


def to_old_layout(folder: Path, config: dict[str, Any]) -> None:
    """Rewrite the files of a run that 04aff00 wrote otherwise: config.json, and state.json of each checkpoint."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in checkpoint.checkpoints(folder / "checkpoints"):
        state = checkpoint.state_of(path)
        now = ("config", "validation_loss", "loss")
        state = {k: v for k, v in state.items() if k not in now} | {
            "config": config["train"], "val_loss_nats": state["validation_loss"]
        }  # fmt: skip
        rewrite_state(path, state)


def rewrite_state(path: Path, state: dict[str, Any]) -> None:
    """Another state.json for a checkpoint, and the manifest that fits it."""
    text = json.dumps(state, indent=1)
    (path / "state.json").write_text(text)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i}.txt").write_text(" ".join(f"word{(i * 7 + j * j) % 97}" for j in range(120)))
    return folder


@pytest.fixture
def run(texts: Path) -> Run:
    return from_dict(Run, upgrade_run(old_config(texts)))


@pytest.fixture
def old(run: Run, texts: Path, tmp_path: Path) -> Path:
    """The folder of a run that 04aff00 stopped after four of six steps."""
    train(run, tmp_path / "old", pause_after=4)
    to_old_layout(tmp_path / "old", old_config(texts))
    return tmp_path / "old"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_it_resumes_to_the_bits_of_a_run_that_was_not_stopped(old: Path, run: Run, tmp_path: Path) -> None:
    whole = train(run, tmp_path / "whole")
    assert bagu("train", "--resume", "--out", old) == 0
    ended = load_model(old).state_dict()
    assert all(torch.equal(tensor, ended[name]) for name, tensor in whole.model.state_dict().items())
    rows = RunFolder(old).metrics()
    assert [row["step"] for row in rows] == list(range(6))
    assert all(
        row["objective_nats"] > row["loss_nats"] for row in rows
    )  # the z-loss is still part of what is minimised
    (resumed,) = [event for event in RunFolder(old).events() if event["kind"] == "resume"]
    assert not [line for line in resumed["changed"] if "z_loss" in line or "objective" in line]
    assert bagu("train", "--resume", "--out", old, "--set", "train.steps=7") == 0  # and once more, from the new layout


def test_its_best_checkpoint_is_kept(old: Path) -> None:
    """keep_best compares checkpoints of both layouts: the first is made the best, and survives the ones after it."""
    first = checkpoint.checkpoints(old / "checkpoints")[0]
    rewrite_state(first, checkpoint.state_of(first) | {"val_loss_nats": 0.5})
    assert bagu("train", "--resume", "--out", old, "--set", "train.steps=10") == 0
    steps = [checkpoint.state_of(path)["step"] for path in checkpoint.checkpoints(old / "checkpoints")]
    assert steps == [2, 8, 10]


def test_a_changed_z_loss_is_reported(old: Path) -> None:
    assert bagu("train", "--resume", "--out", old, "--set", "objective.z_loss=0.01") == 0
    (resumed,) = [event for event in RunFolder(old).events() if event["kind"] == "resume"]
    assert "objective.z_loss: 0.001 → 0.01" in resumed["changed"]


def test_it_reports_and_nothing_else_in_it_changes(old: Path) -> None:
    before = contents(old)
    assert bagu("report", old) == 0
    after = contents(old)
    page = after.pop("report.html").decode()
    assert after == before
    assert "nats per token" in page and "Bits per byte" in page


def test_it_loads_serves_and_exports(old: Path, tmp_path: Path) -> None:
    assert find_model(old) == old / "model"
    model, tokenizer, _ = Loader(model=str(old), dtype="fp32")()  # what `bagu serve --dtype fp32` does
    assert tokenizer.decode(tokenizer.encode("word1")) == "word1"
    last = checkpoint.checkpoints(old / "checkpoints")[-1]
    assert bagu("export", old, tmp_path / "exported") == 0
    for other in (load_model(last), load_model(tmp_path / "exported")):
        assert other.config == model.config
        assert all(torch.equal(t, other.state_dict()[n]) for n, t in model.state_dict().items())


def test_its_config_can_start_another_run(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bagu("train", "--config", old / "config.json", "--out", tmp_path / "other", "--dry-run") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["objective"] == {"kind": "pretrain", "z_loss": 0.001} and "stage" not in shown
    assert load_run(old / "config.json").objective == LanguageModelling(z_loss=0.001)
    assert len(list(training_texts(old))) == 8  # of twelve; what `bagu eval --training` reads


@pytest.mark.parametrize(
    ("old", "objective"),
    [
        ({"stage": "pretrain", "mask_rate": None, "train": {"z_loss": 0.0}}, LanguageModelling()),
        ({"stage": "sft", "mask_rate": None, "train": {"z_loss": 1e-4}}, SupervisedFineTuning(z_loss=1e-4)),
        (
            {"stage": "pretrain", "mask_rate": 0.3, "train": {"z_loss": 1e-4}},
            MaskedLanguageModelling(mask_rate=0.3, z_loss=1e-4),
        ),
        ({"mask_rate": 0.15}, MaskedLanguageModelling()),  # written by hand: what is left out has its default
        ({}, LanguageModelling()),
    ],
)
def test_the_upgrade_moves_three_keys_and_leaves_the_rest(old: dict[str, Any], objective: object) -> None:
    before = json.dumps(old)
    new = upgrade_run({**old, "dtype": "fp32"})
    assert new["dtype"] == "fp32" and not {"stage", "mask_rate"} & new.keys() and "z_loss" not in new.get("train", {})
    assert from_dict(type(objective), new["objective"]) == objective
    assert upgrade_run(new) == new and json.dumps(old) == before


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ({"stage": "sft", "mask_rate": 0.15}, "mask_rate"),
        ({"stage": "pretran"}, "objective.kind: unknown value 'pretran'"),
        ({"train": {"z_loss": "x"}}, "objective.z_loss: expected a number"),
    ],
)
def test_what_was_wrong_before_is_still_refused(old: dict[str, Any], said: str) -> None:
    with pytest.raises(BaguError, match=said):
        from_dict(Run, upgrade_run({**{k: v for k, v in OLD.items() if k not in old}, **old}))


def test_a_checkpoint_of_fit_alone_is_compared_as_it_is() -> None:
    """Without a run there is no objective to compare with: a z_loss that is gone is shown, not dropped."""
    assert upgrade_checkpoint({"z_loss": 0.1, "steps": 2}, {"steps": 3}) == {"z_loss": 0.1, "steps": 2}


def test_the_losses_of_an_old_masked_run_are_said_to_be_of_masked_positions(old: Path) -> None:
    config = RunFolder(old).config()
    (old / "config.json").write_text(json.dumps(config | {"mask_rate": 0.2}))
    headlines = display_of(read_run(old)).headlines
    assert {line.note for line in headlines} == {"of the 20 % of positions that are masked"}
