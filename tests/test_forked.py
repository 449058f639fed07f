"""Processes of tests/forked.py behave as started ones: exit codes, pipes, signals, environment, their own children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.skipif(sys.platform != "linux", reason="a child subreaper"),
]


def run(code: str, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def test_exit_codes_are_those_of_python() -> None:
    assert [run(code).returncode for code in ("pass", "raise SystemExit(3)", "1 / 0")] == [0, 3, 1]
    ended = run("raise SystemExit('no model')")
    assert (ended.returncode, ended.stderr) == (1, "no model\n")
    assert run("import os; os.kill(os.getpid(), 9)").returncode == -signal.SIGKILL
    assert "ZeroDivisionError" in run("1 / 0").stderr


def test_it_was_forked_and_has_its_folder_environment_words_and_pipes(tmp_path: Path) -> None:
    code = "import os, sys; print('torch' in sys.modules, os.getcwd(), os.environ['WORD'], sys.argv, sys.stdin.read())"
    ended = run(code, "a b", input="text", cwd=tmp_path, env={**os.environ, "WORD": "字"})
    assert ended.stdout == f"True {tmp_path} 字 ['-c', 'a b'] text\n", ended.stderr


def test_a_variable_that_is_read_later_changes_nothing() -> None:
    code = "import os, sys; print('torch' in sys.modules, os.environ['PYTHONBREAKPOINT'])"
    assert run(code, env={**os.environ, "PYTHONBREAKPOINT": "0"}).stdout == "True 0\n"


def test_python_with_another_environment_for_imports_is_started() -> None:
    code = "import sys; print('torch' in sys.modules)"
    assert run(code, env={**os.environ, "OMP_NUM_THREADS": "7"}).stdout == "False\n"


def test_it_is_a_child_that_gets_signals_and_may_lead_a_session() -> None:
    code = "import time; print(flush=True); time.sleep(100)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    assert os.getsid(process.pid) == process.pid
    parent = int(Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    assert parent == os.getpid() and process.poll() is None
    process.terminate()
    assert process.wait(20) == -signal.SIGTERM


def test_its_own_processes_are_forked_too() -> None:
    inner = "import sys; print('torch' in sys.modules); raise SystemExit(5)"
    code = f"import subprocess, sys; raise SystemExit(subprocess.run([sys.executable, '-c', {inner!r}]).returncode)"
    ended = run(code)
    assert (ended.returncode, ended.stdout) == (5, "True\n"), ended.stderr


def test_a_module_and_a_file_are_programs(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys\nprint(__name__, __file__ == sys.argv[0], sys.argv[1:])\n")
    for command in (["-m", "program"], [str(tmp_path / "program.py")]):
        found = subprocess.run([sys.executable, *command, "x"], cwd=tmp_path, capture_output=True, text=True)
        assert found.stdout == "__main__ True ['x']\n", found.stderr
