"""`bagu serve --config FILE`: the options of serve from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bagu.cli import main
from bagu.recipes import serve as recipe


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options with which servers would have started."""
    calls: list[Any] = []
    monkeypatch.setattr(recipe, "serve_main", lambda *values: calls.append(values))
    return calls


def serve(*argv: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", *argv])
    assert not end.value.code, end.value.code


def test_a_toml_file_sets_options_and_the_command_line_wins(tmp_path: Path, started: list[Any]) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(
        '# tuned\nmax_num_seqs = 16\nmax-num-batched-tokens = 512\nenable_prefix_caching = false\nthreads = 2\n'
        'quantization = "int8"\nserved_model_name = ["a", "b"]\nshutdown_timeout = 3\ntensor_parallel_size = 1\n'
        'api_keys = "keys.toml"\n'
    )  # fmt: skip
    serve("folder", "--config", str(path), "--max-num-seqs", "4")
    serve("--max-num-seqs", "4", "folder", "--config", str(path))
    first, second = started
    loader, engine, server, *_ = first
    assert first == second and loader.model == "folder"
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.threads) == (4, 512, 2)
    assert (engine.prefix_cache, engine.quantization, engine.tp) == (False, "int8", 1)
    assert server.served_model_name == ("a", "b") and server.shutdown_timeout == 3
    assert server.api_keys == Path("keys.toml")


def test_a_json_file_may_name_the_model(tmp_path: Path, started: list[Any]) -> None:
    path = tmp_path / "serve.json"
    path.write_text(json.dumps({"model": "folder", "served_model_name": "one", "kv_memory": None, "block_size": 32}))
    serve("--config", str(path))
    ((loader, engine, server, *_),) = started
    assert loader.model == "folder" and engine.block_size == 32 and engine.kv_memory is None
    assert server.served_model_name == ("one",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_num_sqs = 4", "did you mean 'max_num_seqs'?"),
        ("config = 'x'", "no option of bagu serve"),
        ("[engine]\nthreads = 1", "'engine'"),
        ('max_num_seqs = "4"', 'max_num_seqs = "4"\n  -> it is a whole number'),
        ("max_num_seqs = 2.5", "it is a whole number"),
        ("max_num_seqs = true", "it is a whole number"),
        ("enable_prefix_caching = 1", "it is true or false"),
        ("host = 1", "it is a string"),
        ("served_model_name = [1]", "it is a string"),
        ("threads = 1\nthreads = 2", "cannot read"),
        ("tp = 1\ntensor-parallel-size = 1", "set twice"),
        ("threads =", "cannot read"),
    ],
)
def test_a_wrong_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], started: list[Any], text: str, says: str
) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["serve", "folder", "--config", str(path)])
    said = capsys.readouterr().err
    assert end.value.code == 2 and not started
    assert said.startswith("bagu: ") and says in said and str(path) in said


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "folder", "--config", str(tmp_path / "no.toml")])
    assert "no.toml: No such file" in capsys.readouterr().err


def test_tune_serve_needs_a_limit_that_is_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "serve", str(tmp_path), "--ttft", "soon"])
    assert "'soon' is not a time limit" in capsys.readouterr().err
