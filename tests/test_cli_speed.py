"""Help and list commands are fast: they do not import torch, nor does a command whose work is in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bagu.lab import catalogue

HELP = """
import contextlib, io, sys
import typer
from bagu.cli import app

def commands(group, path=()):
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))

program = typer.main.get_command(app)  # once: each call of `bagu.cli.main` builds its verb again
for path in commands(program):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        program.main([*path, "--help"], prog_name="bagu")
    assert "Usage: bagu " + " ".join(path) in said.getvalue(), path
    slow = {"torch", "numpy", "transformers", "matplotlib"} & sys.modules.keys()
    assert not slow, f"bagu {' '.join(path)} --help imports {slow}"
    print(" ".join(path))
"""


def test_help_of_every_verb_imports_nothing_heavy() -> None:
    run = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    assert {"", "demo", "serve", "lab list", "bench engine", "tokenizer train"} <= set(run.stdout.splitlines())


LIST = """
import sys
from bagu.cli import main
try:
    main({argv!r})
except SystemExit as end:
    assert not end.code
assert not {{"bagu.cli.bench", "bagu.cli.models", "bagu.cli.serve"}} & sys.modules.keys()  # of other verbs
print(*sorted({{"torch", "torch._dynamo", "sympy"}} & sys.modules.keys()), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("argv", "imported", "cpu_s"),
    [(["--help"], "", 0.5), (["lab", "list"], "", 0.5), (["lab", "run", "--help"], "", 0.5),
     (["drill", "list"], "", 0.5), (["drill", "hint", "softmax"], "", 0.5), (["ops", "list"], "torch", 3.0)],
)  # fmt: skip
def test_list_commands_use_little_cpu(tmp_path: Path, argv: list[str], imported: str, cpu_s: float) -> None:
    """CPU time grows on a busy machine (cold caches), but far less than wall time: three times the bound is allowed.

    Importing torch._dynamo costs 2 s of CPU, sympy 1 s; computing the input shapes of `ops list` needs neither.
    """
    if not hasattr(os, "wait4"):
        pytest.skip("this system does not report the CPU time of a child process")
    process = subprocess.Popen(
        [sys.executable, "-c", LIST.format(argv=argv)], cwd=tmp_path,  # `drill hint` notes what was read
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, said
    assert said.splitlines()[-1] == imported
    assert used.ru_utime + used.ru_stime < 3 * cpu_s


WORK_ELSEWHERE = """
import sys
from bagu.cli import main
from bagu.serve.http import server
server.Server.run = lambda self, name: print("serves", name)  # the socket is bound, no engine process is started
for argv in {commands!r}:
    try:
        main(argv)
    except SystemExit as end:
        print(end.code)
print(*{{"torch", "numpy", "transformers"}} & sys.modules.keys())
"""


def test_serve_and_the_chat_with_a_server_do_not_import_torch(tmp_path: Path) -> None:
    """Importing it takes 3 s and 270 MB. The engine's process needs it; the server's process only checks names."""
    for name in ("hf/config.json", "run/environment.json", "run/model/config.json", "lora/adapter_config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    commands = [
        *(
            ["serve", str(tmp_path / model), "--port", "0", "--adapter", f"a={tmp_path / 'lora'}"]
            for model in ("hf", "run")
        ),
        ["serve", str(tmp_path / "absent")],
        ["chat", "http://127.0.0.1:9", "--prompt", "hello"],
    ]
    script = WORK_ELSEWHERE.format(commands=commands)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert run.stdout.splitlines() == ["serves hf", "0", "serves run", "0", "2", "2", ""], run.stderr


@pytest.mark.parametrize("name", catalogue.names())
def test_the_text_of_a_lab_matches_its_record(name: str) -> None:
    lab, words = catalogue.load(name), catalogue.words(name)
    for field, value in vars(lab.record()).items():
        assert words.get(field, "") == value, field
