"""A run of process data, served by `bagu serve` in a process of its own."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from bagu.process.plants import PLANTS
from bagu.process.plants.history import csv_text, history
from bagu.process.run import create
from tests.forked import starts


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    past, run = history(PLANTS["reactor"], 80, 3), tmp_path_factory.mktemp("serve") / "line3"
    create(csv_text(past.table).encode(), past.schema, run, models=())
    command = [sys.executable, "-m", "bagu", "serve", str(run), "--port", "0"]
    with starts():
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield server.stdout.readline().split(" at ")[1].split()[0]
    server.terminate()
    server.wait(timeout=30)
