"""The notebooks of examples/: the code of every cell runs, one notebook in one process; no output is stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PARTS = {"ops", "model", "data", "train", "post_train", "evaluate", "serve", "plan", "lab"}
TRAIN = {"train", "post_train", "evaluate", "serve"}  # 10 to 25 s of CPU time each


def cells(name: str) -> list[dict[str, Any]]:
    return json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def test_there_is_a_notebook_for_each_part() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == PARTS
    for name in PARTS:
        assert cells(name)[0]["source"][0].startswith("# ")
        assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells(name))


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in TRAIN else ()) for name in sorted(PARTS)]
)
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    code = "\n\n".join("".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code")
    env = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if name in ("train", "post_train"):
        assert "five" in done.stdout
