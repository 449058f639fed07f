"""`bagu train --resume` and `--from` a checkpoint: a refusal changes nothing, and is repeated each time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagu.recipes.models import load_model
from bagu.runs.folder import RunFolder
from bagu.train import checkpoint
from tests.command import bagu

TINY = [
    "model.vocab_size=400", "tokenizer.vocab_size=400", "model.hidden_size=32", "model.num_layers=1",
    "model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=16", "model.intermediate_size=48", "model.max_len=64",
    "data.context=32", "data.rows=4", "train.steps=4", "train.eval_every=2", "train.sample_every=null",
    "train.save_every=2", "train.optimizer.kind=adamw", "dtype=fp32", "validation=0.3", "eval_batches=2",
]  # fmt: skip
SETTINGS = [part for s in TINY for part in ("--set", s)]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with texts, a cache of tokens, and a finished run of four steps."""
    root = tmp_path_factory.mktemp("made")
    (root / "texts").mkdir()
    for i in range(12):
        words = " ".join(f"word{(i * 7 + j * j) % 97} is {j}" for j in range(60))
        (root / "texts" / f"{i}.txt").write_text(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAGU_CACHE", str(root / "cache"))
        assert bagu("train", root / "texts", "--out", root / "run", *SETTINGS) == 0
    yield root


@pytest.fixture
def again(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run that this test may change, its texts beside it."""
    monkeypatch.setenv("BAGU_CACHE", str(tmp_path / "cache"))
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["sources"]["texts"]["path"] = str(tmp_path / "texts")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        pytest.param(["model.hidden_size=64"], "the model of this run is", marks=pytest.mark.slow),
        (["train.optimizer.kind=muon"], "does not fit this run"),
        (["data.context=128"], "positions for"),
        (["data.seed=-1"], "seed is -1"),
    ],
)
def test_a_refused_resume_changes_nothing(
    again: Path, settings: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It used to write config.json first, so that every later resume was refused too."""
    before = contents(again)
    changes = [part for s in settings for part in ("--set", s)]
    assert bagu("train", "--resume", "--out", again, "--set", "train.steps=6", *changes) == 2
    assert said in capsys.readouterr().err
    assert contents(again) == before
    assert bagu("train", "--resume", "--out", again, "--set", "train.steps=5") == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.rows=2"], "data.rows × data.micro_batches was 4 and is 2"),
        (["data.micro_batches=3"], "data.rows × data.micro_batches was 4 and is 12"),
        (["data.context=16"], "data.context was 32 and is 16"),
        (["data.packing=whole"], "data.packing was stream and is whole"),
        (["data.rows=2", "data.micro_batches=2"], None),  # the same rows in every step
    ],
)
def test_a_resume_with_other_rows_is_refused(
    again: Path, settings: list[str], said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was accepted, and skipped rows or read some again."""
    changes = [part for s in ["train.steps=5", *settings] for part in ("--set", s)]
    before = contents(again)
    assert bagu("train", "--resume", "--out", again, *changes) == (2 if said else 0)
    if said:
        assert said in capsys.readouterr().err and contents(again) == before


def test_changed_data_is_refused_or_accepted_and_recorded(again: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume = ["train", "--resume", "--out", again, "--set", "train.steps=6"]
    text = again.parent / "texts" / "3.txt"
    text.write_text(text.read_text() + " and more")
    before = contents(again)
    for dry in ([], ["--dry-run"]):
        assert bagu(*resume, *dry) == 2
        said = capsys.readouterr().err
        assert "'texts' was 12 files" in said and "--accept-data-change" in said
    assert contents(again) == before
    assert bagu(*resume, "--accept-data-change") == 0
    (event,) = [e for e in RunFolder(again).events() if e["kind"] == "data_changed"]
    assert event["step"] == 4 and "'texts'" in event["sources"][0]
    assert bagu("train", "--resume", "--out", again, "--set", "train.steps=7") == 0  # the new data is the run's now


def test_a_run_without_a_record_of_its_data_goes_on_and_gets_one(again: Path) -> None:
    recorded = json.loads((again / "data.json").read_text())["sources"]["texts"]["sha256"]
    (again / "data.json").unlink()
    assert bagu("train", "--resume", "--out", again, "--set", "train.steps=5") == 0
    assert json.loads((again / "data.json").read_text())["sources"]["texts"]["sha256"] == recorded


@pytest.mark.parametrize("setting", ["validation=0.6", "data.seed=3", "dedup=null"])
def test_another_selection_of_the_same_files_is_changed_data(
    again: Path, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Documents that were held out would be trained on, or the other way round."""
    assert bagu("train", "--resume", "--out", again, "--dry-run", "--set", setting) == 2
    assert f"{setting.split('=')[0].split('.')[-1]} of source 'texts' was" in capsys.readouterr().err


def test_a_run_that_was_killed_while_it_saved_its_tokenizer_goes_on(again: Path) -> None:
    """Training a tokenizer is deterministic, so the run has the same one."""
    (again / "tokenizer" / "tokenizer.json").unlink()
    assert bagu("train", "--resume", "--out", again, "--set", "train.steps=5") == 0


def test_accepting_a_change_of_data_needs_a_run_to_resume(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bagu("train", made / "texts", "--out", made / "other", "--accept-data-change", *SETTINGS) == 2
    assert "without a run to resume" in capsys.readouterr().err


def test_a_run_with_bad_checkpoints_alone_is_refused_each_time(again: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first refusal used to rename them, and the second resume began again from step 0 without a word."""
    for path in checkpoint.checkpoints(again / "checkpoints"):
        (path / checkpoint.MODEL).write_bytes(b"")
    before = contents(again)
    for _ in range(2):
        assert bagu("train", "--resume", "--out", again, "--set", "train.steps=6") == 2
        assert "none of the 2 checkpoints" in capsys.readouterr().err
        assert contents(again) == before
    for path in checkpoint.checkpoints(again / "checkpoints"):  # as an earlier bagu has left them
        path.rename(path.with_name(f"bad-{path.name}"))
    assert bagu("train", "--resume", "--out", again, "--set", "train.steps=6") == 2
    assert "none of the 2 checkpoints" in capsys.readouterr().err


def test_a_resume_does_not_write_the_tokenizer_again(again: Path) -> None:
    file = again / "tokenizer" / "tokenizer.json"
    before = file.stat()
    assert bagu("train", "--resume", "--out", again, "--set", "train.steps=5") == 0
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def checkpoint_of(run: Path) -> Path:
    return checkpoint.checkpoints(run / "checkpoints")[-1]


@pytest.mark.parametrize("model", [lambda run: run, checkpoint_of], ids=["run", "checkpoint"])
def test_training_starts_from_a_run_or_one_of_its_checkpoints(again: Path, model: Callable[[Path], Path]) -> None:
    """--from RUN/checkpoints/step-… found no tokenizer."""
    out = again.parent / "more"
    small = ["data.context=32", "data.rows=4", "train.steps=1", "dtype=fp32", "train.sample_every=null",
             "train.optimizer.kind=adamw", "validation=0.3"]  # fmt: skip
    changes = [part for s in small for part in ("--set", s)]
    assert bagu("train", again.parent / "texts", "--from", model(again), "--out", out, *changes) == 0
    assert load_model(out).config == load_model(again).config
