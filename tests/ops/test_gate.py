"""Every Triton kernel compiles for sm_90 without spills, within shared memory, with wide loads."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from bagu.ops.catalogue import SPECS
from bagu.ops.gate import Kernel, faults

TRITON = [s.name for s in SPECS.values() if "triton" in s.backends]


def compile_for_sm_90(*argv: str) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bagu.ops.gate", *argv]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "128 bits wide" in run.stdout


@pytest.mark.parametrize("op", TRITON)
def test_kernels_of_the_first_bench_case_compile_cleanly_for_sm_90(op: str) -> None:
    compile_for_sm_90("--first", "1", op)


@pytest.mark.slow
@pytest.mark.parametrize("op", TRITON)
def test_kernels_of_every_bench_case_compile_cleanly_for_sm_90(op: str) -> None:
    compile_for_sm_90(op)


def test_each_fault_is_named() -> None:
    good = Kernel(
        op="x", case="y", name="k", registers=40, threads=128, spills=0, shared=0,
        wide_loads=2, loads=2, wide_stores=2, stores=2, wants_wide=True, allowed_spills=0, wgmma=4,
        wants_wgmma=True,
    )  # fmt: skip
    assert faults(good) == []
    assert "spills" in faults(replace(good, spills=3))[0]
    assert "3 are allowed" in faults(replace(good, spills=4, allowed_spills=3))[0]
    assert faults(replace(good, spills=3, allowed_spills=3)) == []
    assert "registers" in faults(replace(good, registers=200, threads=512))[0]
    assert "shared memory" in faults(replace(good, shared=240_000))[0]
    assert "128 bits" in faults(replace(good, wide_loads=0))[0]
    assert "wgmma" in faults(replace(good, wgmma=0))[0]
