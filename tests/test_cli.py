"""Command-line errors: a message and a hint, exit status 2, no traceback."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import typer

from bagu.cli import main
from bagu.cli.options import takes
from bagu.config.options import to_arguments
from bagu.recipes.verbs import DemoOptions, TrainOptions
from bagu.runs.record import record_file
from bagu.serve.config import parse_bytes


@pytest.mark.parametrize("traceback", ["0", "1"])
def test_an_unwritable_path_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, traceback: str
) -> None:
    file = tmp_path / "file"
    file.write_text("a few words to learn from")
    monkeypatch.setenv("BAGU_TRACEBACK", traceback)
    with pytest.raises(NotADirectoryError if traceback == "1" else SystemExit):
        main(["tokenizer", "train", str(file / "x"), str(file)])
    if traceback == "0":
        said = capsys.readouterr().err
        assert said.startswith("bagu: ") and str(file) in said and "->" in said


@pytest.mark.parametrize(
    "command",
    [
        "bench ops softmax",
        "bench train",
        "bench engine",
        "bench serve http://127.0.0.1:1",
        "bench constrained",
        "lab run safe_softmax --quick",
    ],
)
def test_an_unwritable_results_folder_fails_before_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SystemExit):
        main([*command.split(), "--out", str(file / "x")])
    out, err = capsys.readouterr()
    assert err.startswith(f"bagu: cannot create the folder {file / 'x'}")
    assert "%" not in out and "GB/s" not in out  # nothing was measured


def test_a_results_path_that_is_a_folder_fails_before_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_file(tmp_path).mkdir()
    with pytest.raises(SystemExit):
        main(["bench", "ops", "softmax", "--out", str(tmp_path)])
    out, err = capsys.readouterr()
    assert "is not a writable file" in err and "GB/s" not in out


def test_serve_help_lists_kv_and_log_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    for option in ("--kv-memory", "--num-blocks", "--log-level", "--generation-config"):
        assert option in shown


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--kv-memory", "lots"], "'lots' is not a size"),
        (["--log-level", "loud"], "there is no log level 'loud'"),
        (["--num-blocks", "0"], "num_blocks"),
        (["--generation-config", "nowhere"], "nowhere/generation_config.json"),
    ],
)
def test_serve_errors_name_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", str(tmp_path), *option])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("serve . --threads 0", "threads = 0"),
        ("bench dpo --pairs 0 --device cpu", "0 pairs"),
        (f"bench dpo --peer {__file__} --device cpu", "there is no peer"),
        ("bench grpo --output-tokens 0 --device cpu", "samples of 0 tokens"),
        ("bench layers linear --batch 0 --device cpu", "batches [0]"),
        ("bench layers linear --seconds -1 --device cpu", "-1.0 seconds"),
        ("bench layers linear --device gpu", "unknown device 'gpu'"),
        ("bench engine --streams 0", "streams is 0"),
        ("bench engine --streams 1 --adapters -1", "adapters is -1"),
        ("bench serve http://127.0.0.1:1 --warmups -1", "warmups is -1"),
        ("ops show softmax --config num_warps=8", "add --kernel"),
        ("plan --model llama3-8b --rate 3", "--rate is an option for planning a deployment"),
        ("plan --serve --model llama3-8b --batch 64", "--batch is an option for planning a training run"),
        (f"tune merge {__file__}", "has no tuning record"),
    ],
)
def test_a_wrong_value_is_refused_with_a_hint(capsys: pytest.CaptureFixture[str], command: str, said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and shown.startswith("bagu: ") and said in shown and "->" in shown


@pytest.mark.parametrize("verb", ["chat", "serve"])
def test_a_folder_of_runs_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    for name in ("pretrain", "sft"):
        (tmp_path / "demo" / name).mkdir(parents=True)
        (tmp_path / "demo" / name / "environment.json").write_text("{}")
    with pytest.raises(SystemExit):
        main([verb, str(tmp_path / "demo")])
    shown = capsys.readouterr().err
    assert "is not a model" in shown and str(tmp_path / "demo" / "sft") in shown


def test_parse_bytes_understands_units() -> None:
    sizes = {"1000": 1000, "2GB": 2 * 10**9, "512MiB": 512 * 2**20, "1.5 kib": 1536}
    assert {text: parse_bytes(text) for text in sizes} == sizes


def test_options_of_a_dataclass_come_back_from_the_command_line_that_gives_them() -> None:
    given = TrainOptions(
        data=("a.txt", "b c.txt"), settings=("train.steps=3", "data.rows=2"), out=Path("x y"), resume=True, start="m",
        max_restarts=0, hang_timeout=1.5,
    )  # fmt: skip
    app, seen = typer.Typer(), list[TrainOptions]()
    app.command()(takes(TrainOptions)(seen.append))
    app(to_arguments(given), standalone_mode=False)
    app(to_arguments(given, without=("data", "start")), standalone_mode=False)
    app([], standalone_mode=False)
    assert seen == [given, replace(given, data=(), start=None), TrainOptions()]
    assert to_arguments(TrainOptions()) == [] and to_arguments(DemoOptions(serve=False)) == ["--no-serve"]
