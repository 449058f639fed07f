"""Hostile programs in the sandbox: each ends, none reaches anything outside, by either kind of isolation."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from bagu.errors import BackendError
from bagu.machine.sandbox import Limits, Sandbox, SandboxUnavailable, landlock
from bagu.machine.sandbox.client import Isolation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="code is isolated on Linux alone")
SHORT = Limits(seconds=1.0)
PATIENT = Limits(seconds=60.0)  # for programs that end by themselves, on a machine that is busy


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    kind: Isolation = request.param
    try:
        made = Sandbox(workers=2, isolation=[kind], limits=PATIENT)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with made:
        yield made


def test_output_exit_code_and_errors_come_back(sandbox: Sandbox) -> None:
    ok = sandbox.run("import json, math\nprint(json.dumps({'八股': math.pi}))")
    assert (ok.status, ok.exit_code, ok.stdout) == ("ok", 0, '{"\\u516b\\u80a1": 3.141592653589793}\n')
    failed = sandbox.run("def f(x):\n    return 1 / x\nf(0)")
    assert (failed.status, failed.exit_code, failed.stdout) == ("error", 1, "")
    assert failed.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "zygote" not in failed.stderr  # the frames of the code alone
    assert sandbox.run("raise SystemExit(3)").exit_code == 3
    assert sandbox.run("def f(:").stderr.splitlines()[-1].startswith("SyntaxError")


def test_nothing_is_left_for_the_next_program(sandbox: Sandbox) -> None:
    assert sandbox.run("import builtins, os\nbuiltins.print = None\nopen('left', 'w').close()").status == "ok"
    assert sandbox.run("import os\nprint(os.listdir('.'))").stdout == "[]\n"


def test_an_endless_loop_and_a_wait_for_input_end(sandbox: Sandbox) -> None:
    began = time.monotonic()
    assert sandbox.run("while True: pass", SHORT).status == "timeout"
    assert sandbox.run("import time\ntime.sleep(60)", SHORT).status == "timeout"
    assert time.monotonic() - began < 60
    assert "EOFError" in sandbox.run("input()").stderr


def test_memory_is_bounded(sandbox: Sandbox) -> None:
    assert "MemoryError" in sandbox.run("x = bytearray(1 << 30)").stderr


def test_a_fork_bomb_ends(sandbox: Sandbox) -> None:
    result = sandbox.run("import os\nwhile True:\n    os.fork()", SHORT)
    assert result.status in ("error", "timeout")
    assert sandbox.run("print('next')").stdout == "next\n"


def test_output_is_cut(sandbox: Sandbox) -> None:
    code = "import sys\nfor _ in range(8): sys.stdout.write('x' * (1 << 20))"  # far more than a pipe holds
    result = sandbox.run(code, replace(PATIENT, output_bytes=1000))
    assert (result.status, len(result.stdout)) == ("ok", 1000)


def test_files_outside_are_neither_read_nor_written(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    mode, time_before = secret.stat().st_mode, secret.stat().st_mtime
    for attempt in (
        f"print(open({str(secret)!r}).read())",
        f"open({str(secret)!r}, 'w').write('gone')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"import os\nos.chmod({str(secret)!r}, 0)",
        f"import os\nos.utime({str(secret)!r}, (0, 0))",
        f"import os\nos.remove({str(secret)!r})",
        f"import os\nos.rename({str(secret)!r}, {str(tmp_path / 'b')!r})",
        "open('/usr/bagu', 'w')",
        "open('/etc/passwd').read()",
    ):
        result = sandbox.run(attempt)
        assert result.status == "error" and "key" not in result.stdout, attempt
    assert [p.name for p in tmp_path.iterdir()] == ["secret"]
    assert (secret.read_text(), secret.stat().st_mode, secret.stat().st_mtime) == ("key", mode, time_before)


def test_the_disk_is_bounded(sandbox: Sandbox) -> None:
    code = "with open('a', 'wb') as f:\n    for _ in range(64): f.write(b'x' * (1 << 20))"
    assert sandbox.run(code, replace(PATIENT, disk_bytes=4 << 20)).status in ("error", "killed")


def test_no_other_process_is_signalled(sandbox: Sandbox) -> None:
    for victim in (f"{os.getpid()}", "os.getppid()", "-1"):
        sandbox.run(f"import os, signal\nos.kill({victim}, signal.SIGKILL)", SHORT)
    assert sandbox.run("print(1)").stdout == "1\n"


def test_there_is_no_network_and_no_environment(sandbox: Sandbox) -> None:
    connect = "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=1)"
    assert sandbox.run(connect).status == "error"
    assert sandbox.run("import os\nprint(dict(os.environ))").stdout == "{}\n"


def test_programs_run_at_once_and_keep_their_order(sandbox: Sandbox) -> None:
    found = sandbox.run_all(f"print({i})" for i in range(12))
    assert [r.stdout for r in found] == [f"{i}\n" for i in range(12)]


def test_installed_packages_are_not_importable(sandbox: Sandbox) -> None:
    assert "ModuleNotFoundError" in sandbox.run("import torch").stderr
    assert "ModuleNotFoundError" in sandbox.run("import bagu.machine.device").stderr


def test_a_system_without_isolation_refuses() -> None:
    with pytest.raises(SandboxUnavailable, match="permits no isolation"):
        Sandbox(workers=1, isolation=[])


def test_a_landlock_that_lets_code_truncate_is_taken_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "_abi", lambda: 2)  # Linux 5.19; this kernel has one ABI
    with pytest.raises(OSError, match="lets code truncate files"):
        landlock.check()
    landlock.check(weak=True)


def test_the_setting_names_the_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGU_SANDBOX", "landlock-weak")
    with Sandbox(workers=1, limits=PATIENT) as named:
        assert (named.isolation, named.run("print(1)").stdout) == ("landlock-weak", "1\n")
    monkeypatch.setenv("BAGU_SANDBOX", "none")
    with pytest.raises(BackendError, match="BAGU_SANDBOX is 'none'"):
        Sandbox(workers=1)


def test_a_program_ends_with_its_helper_and_its_folder_is_removed() -> None:
    with Sandbox(workers=1, isolation=["landlock"], limits=PATIENT) as one:
        began = {p.name for p in Path("/tmp").glob("bagu-sandbox-*")}
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(one.run, "import time\ntime.sleep(1)", replace(PATIENT, seconds=3.0))
            while not (made := {p.name for p in Path("/tmp").glob("bagu-sandbox-*")} - began):
                time.sleep(0.01)
            one._all[0]._process.kill()
            with pytest.raises(EOFError):
                running.result()
        deadline = time.monotonic() + 30
        while any((Path("/tmp") / name).exists() for name in made):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_programs_of_the_standard_library_run(sandbox: Sandbox) -> None:
    """What the allow-list must not refuse. Threads, processes and sockets are for namespaces alone."""
    code = """
import decimal, hashlib, json, os, random, re, shutil, signal, sqlite3, tempfile, time, zlib
with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as file:
    file.write(b"x"); file.seek(0); assert file.read() == b"x"
    os.makedirs(folder + "/a/b"); open(folder + "/a/b/c", "w").write("y")
    shutil.copyfile(folder + "/a/b/c", folder + "/d"); os.rename(folder + "/d", folder + "/e")
    assert sorted(os.listdir(folder)) == ["a", "e"]
db = sqlite3.connect("x.db"); db.execute("create table t(a)"); db.execute("insert into t values (1)"); db.commit()
signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()
signal.signal(signal.SIGUSR1, lambda *_: print("own signal")); os.kill(os.getpid(), signal.SIGUSR1)
signal.raise_signal(signal.SIGUSR1)
os.get_terminal_size if os.isatty(0) else time.sleep(0.001)
"""
    more = """
import asyncio, subprocess, threading
threading.Thread(target=print, args=("thread",)).start()
print(subprocess.run(["/bin/sh", "-c", "echo process"], capture_output=True, text=True).stdout, end="", flush=True)
asyncio.run(asyncio.sleep(0.001)); shutil.copy2("x.db", "y.db")
"""
    result = sandbox.run(code + (more if sandbox.isolation == "namespaces" else ""))
    said = "own signal\nown signal\n" + ("thread\nprocess\n" if sandbox.isolation == "namespaces" else "")
    assert (result.stderr, result.stdout) == ("", said)


MOUNTED = """
from bagu.machine.sandbox import Sandbox, syscalls
syscalls.unshare(syscalls.CLONE_NEWNS)
syscalls.mount("none", "/", None, 16384 | 1 << 18)
syscalls.mount("tmpfs", "/usr/share", "tmpfs", 0, "mode=777")
with Sandbox(workers=1, isolation=["namespaces"]) as sandbox:
    print(sandbox.run("open('/usr/share/left', 'w')").stderr)
"""


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="root alone may mount")
def test_a_mount_below_a_readable_folder_is_read_only() -> None:
    found = subprocess.run([sys.executable, "-c", MOUNTED], capture_output=True, text=True, timeout=60, check=False)
    if "Operation not permitted" in found.stderr:
        pytest.skip(found.stderr.splitlines()[-1])
    assert "Read-only file system" in found.stdout


def test_a_worker_that_died_is_started_again() -> None:
    with Sandbox(workers=1, limits=PATIENT) as one:
        one._all[0]._process.kill()
        one._all[0]._process.wait()
        assert one.run("print('again')").stdout == "again\n"
