"""The path of a cached op call stays short: a reader follows it from the public function to the launch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from benchmarks.tools.op_path import cached_call, functions
for file, name in functions(cached_call()):
    print(file, name)
"""


@pytest.mark.usefixtures("forked")
def test_a_cached_call_passes_few_functions_in_few_files() -> None:
    """In a process of its own: without a GPU its tensors claim to be on one, and launches do nothing."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the path is that of host code, which `make test` shows; the interpreter is not used beside a GPU")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    files = [line.split()[0] for line in lines]
    moves = [file for i, file in enumerate(files) if i == 0 or files[i - 1] != file]
    assert len(set(lines)) <= 12, run.stdout
    assert len({f for f in files if f.startswith("bagu/")}) <= 4, run.stdout
    assert len(moves) - len(set(moves)) <= 3, run.stdout
    assert files[0] == "bagu/ops/rms_norm/__init__.py" and lines[-1].endswith(" replay")
