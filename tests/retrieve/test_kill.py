"""kill -9 at any moment of an update: the index opens, is whole, and has every file that was confirmed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bagu.retrieve.core import search
from bagu.retrieve.store import Store

WRITER = """
import os, sys
from pathlib import Path
from bagu.retrieve.store import Store
from bagu.retrieve.update import update
def told(done, paths):
    for path in paths:
        text = Path(path).read_text()
        os.write(1, (Path(path).name + " " + text.split()[0] + "\\n").encode())
store = Store(Path(sys.argv[1]))
os.write(1, b"open\\n")
while True:  # files change all the time, so the update never ends
    for path in Path(sys.argv[2]).iterdir():
        version = int(path.read_text().split()[0].removeprefix("v")) + 1
        path.write_text(f"v{version} " + path.read_text().split(" ", 1)[1])
    update(store, [Path(sys.argv[2])], batch=400, report=told)
"""


def _kill_and_check(tmp_path: Path, times: int) -> None:
    rng = random.Random(0)
    docs, index = tmp_path / "docs", tmp_path / "idx"
    docs.mkdir()
    for i in range(12):
        (docs / f"{chr(97 + i)}.txt").write_text(
            f"v0 unique{chr(97 + i)} " + " ".join(rng.choices(["one", "two", "three", "four"], k=40))
        )
    confirmed: dict[str, int] = {}
    for _ in range(times):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(index), str(docs)], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"open\n"
        first = [writer.stdout.readline() for _ in range(0 if confirmed else 12)]  # each file once, however slow
        time.sleep(rng.uniform(0, 0.15))
        os.kill(writer.pid, signal.SIGKILL)
        for line in b"".join([*first, writer.stdout.read()]).decode().splitlines():
            name, version = line.split()
            confirmed[name] = int(version.removeprefix("v"))
        writer.wait()
        writer.stdout.close()
        with Store(index) as store:
            assert store.db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            for name, version in confirmed.items():
                (hit,) = search(store, f"unique{name.removesuffix('.txt')}")
                stored = int(hit.passage.text.split()[0].removeprefix("v"))
                assert Path(hit.passage.file).name == name and stored >= version
        for path in docs.iterdir():  # the writer may have been killed between truncating and writing a file
            if not path.read_text():
                path.write_text(f"v{confirmed.get(path.name, 0) + 1} unique{path.stem} a b c")
    assert len(confirmed) == 12


def test_kill_at_ten_points(tmp_path: Path) -> None:
    _kill_and_check(tmp_path, 10)


@pytest.mark.slow
def test_kill_at_a_hundred_points(tmp_path: Path) -> None:
    _kill_and_check(tmp_path, 100)
