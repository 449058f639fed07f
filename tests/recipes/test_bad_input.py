"""What a hostile user gives `bagu train`: each is answered with one sentence and a hint, none with a traceback."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bagu.config import from_dict, to_dict
from bagu.errors import BaguError
from bagu.recipes.catalogue import recipe
from bagu.recipes.run import Run
from bagu.runs.folder import RunFolder
from tests.command import bagu

TINY = [
    "model.vocab_size=400", "tokenizer.vocab_size=400", "model.hidden_size=32", "model.num_layers=1",
    "model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=16", "model.intermediate_size=48", "model.max_len=64",
    "data.context=32", "data.rows=4", "train.steps=1", "train.eval_every=null", "train.sample_every=null",
    "train.save_every=null", "train.optimizer.kind=adamw", "dtype=fp32", "validation=0.3",
]  # fmt: skip


def settings(*more: str) -> list[str]:
    return [part for s in (*TINY, *more) for part in ("--set", s)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a text, a run on it, and a cache with its tokens, which is this module's."""
    root = tmp_path_factory.mktemp("made")
    (root / "text.jsonl").write_text("".join(json.dumps({"text": f"text {i * i} " * 20}) + "\n" for i in range(10)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAGU_CACHE", str(root / "cache"))
        assert bagu("train", root / "text.jsonl", "--out", root / "run", *settings()) == 0
        yield root


@pytest.fixture
def texts(made: Path) -> Path:
    return made / "text.jsonl"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--set", "train.seed=-1"], "train: seed is -1"),
        (["--set", "data.seed=-1"], "data: seed is -1"),
        (["--set", "data.seed=9223372036854775808"], "seed is 9223372036854775808"),
        (["--set", "lora.targets=(", "--from", "x"], "not a regular expression"),
        (["--set", "lora.rank=0", "--from", "x"], "rank is 0"),
        (["--set", "tokenizer.max_mb=nan"], "not finite"),
        (["--set", "data.mix.weights=" + "[" * 100_000], "data.mix.weights"),
        (["--wandb", ""], "wandb is an empty name"),
    ],
    ids=["train.seed", "data.seed", "large seed", "regex", "rank", "nan", "deep JSON", "wandb"],
)
def test_impossible_settings(
    made: Path, texts: Path, tmp_path: Path, given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(made / "run") if word == "x" else word for word in given]
    assert bagu("train", texts, "--out", tmp_path / "run", *given) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_learns_from_a_number_of_megabytes(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bagu("tokenizer", "train", tmp_path / "t", texts, "--max-mb", "nan") == 2
    assert "--max-mb is nan" in capsys.readouterr().err


def test_a_prompt_that_the_model_has_no_room_for(
    made: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused before the first step, not at the first sample."""
    given = settings("train.sample_every=1")
    assert bagu("train", texts, "--out", tmp_path / "run", *given, "--prompt", "text 4 " * 100) == 2
    assert "a prompt to continue has" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def broken(data: Any) -> Iterator[tuple[str, Any]]:
    """The tree with one value at a time replaced by one of another type, and the key of it."""
    for key, value in data.items() if isinstance(data, dict) else ():
        for other in ("text", -1.5, [1], {"x": 1}, True):
            if type(other) is not type(value):
                yield key, {**data, key: other}
        for below, changed in broken(value):
            yield f"{key}.{below}", {**data, key: changed}


def test_wrong_types_in_a_config_are_refused() -> None:
    """Every value of every key, replaced by one of each other JSON type: an error of bagu's own, or a run."""
    refused = 0
    for key, data in broken(to_dict(recipe("small"))):
        try:
            from_dict(Run, data)
        except BaguError as error:
            refused += 1
            assert len(str(error).splitlines()) == 1, key
    assert refused > 200


@pytest.mark.parametrize("content", ["[]", "[1]", "3", '"x"', "null", "{", "[" * 100_000, ""])
@pytest.mark.parametrize("verb", ["train", "report"])
def test_a_run_whose_config_is_no_object(
    tmp_path: Path, content: str, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFolder.create(tmp_path / "run", {}).close()
    (tmp_path / "run" / "config.json").write_text(content)
    given = ["train", "--resume", "--out", tmp_path / "run"] if verb == "train" else ["report", tmp_path / "run"]
    assert bagu(*given) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["12", [12], {"a": 1}, None, -1, 2.5, True], ids=str)
def test_wrong_types_in_a_models_config(
    made: Path, tmp_path: Path, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A size of the starting model: no value of another type is a traceback, or the start of a run."""
    shutil.copytree(made / "run" / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for key in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "max_position_embeddings"):
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | {key: value}))
        given = ["--from", tmp_path / "model", "--out", tmp_path / "run", "--set", "data.context=32", "--dry-run"]
        status = bagu("train", made / "text.jsonl", *given)
        assert (status, key) == (2, key), capsys.readouterr().err


@pytest.mark.parametrize("room", [0, 600, 4000, 12000])
def test_a_disk_that_is_full_at_the_start(
    made: Path, tmp_path: Path, room: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file may grow past `room` bytes: the lock, config.json, the tokenizer or the weights do not fit."""
    resource = pytest.importorskip("resource")
    new = ["train", made / "text.jsonl", "--out", tmp_path / "run", *settings()]
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        status = bagu(*new)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    said = capsys.readouterr().err
    assert status == 2
    assert "File too large" in said and "free some disk space" in said
    begun = RunFolder(tmp_path / "run").is_run()  # with room again it begins, or goes on
    assert bagu(*(["train", "--resume", "--out", tmp_path / "run"] if begun else new)) == 0


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_weights_and_biases_is_named_where_it_is_missing(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ([], ["--dry-run"]):
        assert bagu("train", texts, "--out", tmp_path / "run", "--wandb", "project", *settings(), *more) == 2
        assert "bagu[wandb]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
