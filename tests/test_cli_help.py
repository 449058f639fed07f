"""Help fits a screen of 80 columns, its examples are valid, old names of options work, wrong paths are found early."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from bagu import __version__
from bagu.cli import app, main
from bagu.cli.help import RENAMED, SCREEN, with_new_names

PROGRAM: Any = typer.main.get_command(app)


def commands(command: Any = PROGRAM, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inside in getattr(command, "commands", {}).items():
        yield from commands(inside, (*path, name))


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        PROGRAM.main(list(words), prog_name="bagu")
    assert not end.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize(("path", "command"), [pytest.param(*found, id=" ".join(found[0])) for found in commands()])
def test_help_fits_a_screen_and_every_option_is_whole(
    path: tuple[str, ...], command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = shown(capsys, *path, "-h"), shown(capsys, *path, "--help-all")
    assert short == shown(capsys, *path, "--help")
    assert len(short.splitlines()) <= SCREEN
    assert all(len(line) <= 80 for line in (short + whole).splitlines())
    for param in command.params:
        if not getattr(param, "hidden", False) and param.param_type_name == "option":
            assert param.opts[0] in short.replace(",", " ").replace("/", " ").split(), param.name
            assert (param.help or "").split()[-1] in whole
    examples = whole.partition("\nExamples:\n")[2].splitlines()
    assert 1 <= len(examples) <= 2
    for example in examples:
        name, *words = shlex.split(example, comments=True)
        called = PROGRAM
        while words and words[0] in getattr(called, "commands", {}):
            called = called.commands[words.pop(0)]
        with contextlib.suppress(typer.Exit):  # an example that asks for help
            assert name == "bagu" and called.make_context(name, words)  # raises for an option that does not exist


def test_old_names_of_options_mean_the_new_ones(capsys: pytest.CaptureFixture[str]) -> None:
    used = set()
    for path, command in commands():
        flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
        context = command.make_context("x", [], resilient_parsing=True)
        context.resilient_parsing = False
        for old, new in RENAMED.items():
            found = with_new_names(command, context, ["a", f"{old}=1"])
            if new in flags and old not in flags:
                used.add(old)
                assert found == ["a", f"{new}=1"]
                assert f"bagu: {old} is now {new}; the old name works until 0.2" in capsys.readouterr().err, path
            else:
                assert found == ["a", f"{old}=1"]
    assert used == RENAMED.keys()


def test_old_ways_of_verbs_work_and_say_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, said in (
        (["plan", "--serve", "--model", "llama3-8b", "--rate", "2", "--token-ms", "40", "--json"], "--tpot"),
        (["ops", "show", "softmax", "--size", "M=4,N=8"], "--sizes"),
        (["eval", "--compare", str(tmp_path), str(tmp_path)], "bagu compare A B"),
        (["bench", "serve", "http://127.0.0.1:1", "--goodput", "ttft:3ms", "--out", str(tmp_path)], "--ttft"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert f"is now {said}" in capsys.readouterr().err.replace("now: ", "now ")


def test_version_names_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "version").startswith(f"bagu {__version__}\nPython 3.")


def test_lab_run_without_a_name_lists_the_labs(capsys: pytest.CaptureFixture[str]) -> None:
    main_output = shown(capsys, "lab", "run")
    assert "safe_softmax" in main_output and "bagu lab run NAME" in main_output


MISSING = """
import contextlib, io, sys
from bagu.cli import main
for words in {commands!r}:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main(words)
        except SystemExit as end:
            assert end.code == 2, words
    assert "absent" in said.getvalue() and "->" in said.getvalue(), (words, said.getvalue())
    assert "torch" not in sys.modules, words
"""


def test_a_missing_file_is_reported_without_torch(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    lines = (
        "train absent.txt", "train --from absent", "train --config absent.json", "eval absent continue4",
        f"eval {tmp_path}/hf absent.toml", f"eval {tmp_path}/hf gsm8k=absent.jsonl", "compare absent absent",
        "export absent out", "report absent", "chat absent", "serve absent",
        f"serve {tmp_path}/hf --config absent.toml", "tokenizer train out absent",
        "tokenizer stats absent", "profile serve absent", "tune serve absent",
        "tune merge absent", "bench engine absent", "bench constrained absent", "bench serve absent",
        "bench serve http://127.0.0.1:1 --trace absent.csv", "plan --model absent.json", "lab run absent",
    )  # fmt: skip
    script = MISSING.format(commands=[line.split() for line in lines])
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr


@pytest.mark.usefixtures("forked")
def test_the_page_of_settings_is_current() -> None:
    """In a process of its own: a test may have defined an objective."""
    subprocess.run([sys.executable, "-m", "benchmarks.tools.settings", "--check"], check=True, timeout=120)
