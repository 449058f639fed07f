"""The number of cores that a process may use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bagu.machine.cores import available_cores


def test_a_process_counts_the_cores_of_its_affinity_mask() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no affinity masks")
    core = min(os.sched_getaffinity(0))
    code = "import os; from bagu.machine import cores; os.sched_setaffinity(0, {%d}); print(cores.available_cores())"
    found = subprocess.run([sys.executable, "-c", code % core], capture_output=True, text=True, check=True)
    assert int(found.stdout) == 1
    assert available_cores() == len(os.sched_getaffinity(0))
