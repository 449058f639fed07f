"""A run that goes on computes in the dtype it began with, whatever is fast by then."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagu.cli import main
from bagu.runs.folder import RunFolder
from bagu.train.checkpoint import checkpoints, state_of

pytestmark = pytest.mark.usefixtures("own_cache")

TINY = (
    "model.vocab_size=300", "tokenizer.vocab_size=300", "model.hidden_size=32", "model.num_layers=1",
    "model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=16", "model.intermediate_size=48", "model.max_len=64",
    "data.context=32", "data.rows=2", "train.steps=2", "train.eval_every=null", "train.sample_every=null",
    "train.save_every=2", "validation=0.3", "dtype=null", "train.optimizer.kind=muon",
)  # fmt: skip


def fast_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagu.recipes.training.compute_dtype_name", lambda device: name)
    monkeypatch.setattr("bagu.train.optim.config.compute_dtype_name", lambda device: name)


def dtypes(out: Path) -> tuple[str, str, str]:
    """Of the run's config, of its Muon, and of its last checkpoint's Muon."""
    config = RunFolder(out).config()
    saved = state_of(checkpoints(out / "checkpoints")[-1])["config"]["optimizer"]
    return config["dtype"], config["train"]["optimizer"]["newton_schulz_dtype"], saved["newton_schulz_dtype"]


def test_a_resumed_run_keeps_its_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(8):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{i}.txt").write_text(" ".join(f"word{(i * 7 + j * j) % 97}" for j in range(200)))
    out = tmp_path / "run"
    fast_is("fp32", monkeypatch)
    settings = [part for s in TINY for part in ("--set", s)]
    with pytest.raises(SystemExit) as end:
        main(["train", str(tmp_path / "texts"), "--out", str(out), *settings])
    assert not end.value.code and dtypes(out) == ("fp32", "fp32", "fp32")
    fast_is("bf16", monkeypatch)
    with pytest.raises(SystemExit) as end:
        main(["train", "--resume", "--out", str(out), "--set", "train.steps=4"])
    assert not end.value.code and dtypes(out) == ("fp32", "fp32", "fp32")
    assert len(RunFolder(out).metrics()) == 4
