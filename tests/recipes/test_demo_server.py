"""`running_server` ends its server however the program that started it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_generation import saved

from bagu.errors import BaguError
from bagu.recipes.demo_server import running_server

PATIENCE_S = 180.0
SCRIPT = """
import sys, time
from bagu.recipes.demo_server import running_server
with running_server(sys.argv[1]) as url:
    print(url, flush=True)
    time.sleep(600)
"""


def group_is_alive(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="process groups")
def test_sigterm_ends_the_server_and_its_engine(tmp_path: Path) -> None:
    """The signal goes to the starting process alone. All three processes are in its group."""
    saved(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("http://")
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=PATIENCE_S)
        end = time.monotonic() + PATIENCE_S
        while group_is_alive(process.pid) and time.monotonic() < end:
            time.sleep(0.05)  # the engine process ends after its server
        assert not group_is_alive(process.pid)
    finally:
        if group_is_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server_that_does_not_start_is_reported_with_its_output(tmp_path: Path) -> None:
    said = r"the server ended with status 2: bagu: .*missing"
    with pytest.raises(BaguError, match=said), running_server(tmp_path / "missing"):
        pass
