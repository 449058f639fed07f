"""`bagu drill try` with bagu's own solutions as answers: the losses and the tokens of the stack stay as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bagu.errors import ArgumentError
from bagu.lab.drill.catalogue import drill
from bagu.lab.drill.swap import REQUESTS, run_both

FIRST = "softmax"  # in `make test`; each takes 6 s
KINDS = (FIRST, "rms_norm", "flash_attention", "sampling", "bpe", "ring_all_reduce")
# one process for all kinds: importing torch takes longer than a run
EACH = """
import json, sys
from pathlib import Path
from bagu.lab.drill.catalogue import drill
from bagu.lab.drill.swap import both
for name in sys.argv[2:]:
    folder = Path(sys.argv[1]) / name
    folder.mkdir()
    print("found", json.dumps([name, both(drill(name), f"{folder}.py", folder, 2)]), flush=True)
"""


def written(folder: Path, name: str) -> Path:
    found, file = drill(name), folder / f"{name}.py"
    file.write_text(found.solutions[found.levels[0]])
    return file


def runs(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    for name in names:
        written(folder, name)
    command = [sys.executable, "-c", EACH, str(folder), *names]
    env = {**os.environ, "BAGU_NATIVE": "0", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=env, timeout=500, check=False)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(line[6:]) for line in run.stdout.splitlines() if line.startswith("found "))


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("names", [(FIRST,), pytest.param(KINDS[1:], marks=pytest.mark.slow)], ids=len)
def test_bagus_own_part_as_the_answer_changes_nothing(tmp_path: Path, names: Sequence[str]) -> None:
    for name, found in runs(tmp_path, names).items():
        own, mine = found["own"], found["mine"]
        assert mine["calls"] > 0 and own["calls"] == 0, name
        assert len(own["losses"]) == 2
        assert max(abs(a - b) for a, b in zip(own["losses"], mine["losses"], strict=True)) <= 1e-5, name
        assert own["results"] == mine["results"] and len(own["results"]) == REQUESTS, name


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_fifty_steps_end_with_the_same_loss(tmp_path: Path, name: str) -> None:
    *_, called, _, moved, served = run_both(drill(name), written(tmp_path, name))
    assert "called 0 times" not in called
    assert float(moved.split("own ")[1].split(";")[0]) <= 1e-5
    assert served.startswith(f"{REQUESTS} of {REQUESTS} ")


@pytest.mark.slow
def test_what_differs_is_seen(tmp_path: Path) -> None:
    """An answer that passed no check: every gradient is doubled."""
    file = tmp_path / "ring_all_reduce.py"
    file.write_text("def all_reduce(x, rank, world, send, recv):\n    return x * 2\n")
    lines = list(run_both(drill("ring_all_reduce"), file, steps=2))
    assert any(line.startswith("  pretrain 2/2 steps") for line in lines)
    assert float(lines[-2].split("own ")[1].split(";")[0]) > 1e-4


def test_a_part_without_a_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="gae has no place in the stack"):
        list(run_both(drill("gae"), tmp_path / "gae.py"))
