"""Every Triton kernel compiles for sm_90 without spills, within shared memory, with wide loads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bagu.ops.catalogue import SPECS
from bagu.ops.inspect.gate import Kernel, faults

TRITON = [s.name for s in SPECS.values() if "triton" in s.backends]
# One of each kind of kernel: compiling an op takes 2.3 s. The slow test has all ops.
KINDS = (
    "rms_norm", "softmax", "matmul", "conv2d", "attention", "paged_attention", "linear_cross_entropy_loss", "sample",
)  # fmt: skip


def compile_for_sm_90(ops: Sequence[str], *argv: str) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bagu.ops.inspect.gate", *argv, *ops]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert {line.split()[0] for line in run.stdout.splitlines() if "128 bits wide" in line} == set(ops)


@pytest.mark.parametrize("ops", [KINDS[::2], KINDS[1::2]], ids=lambda ops: f"{len(ops)}_ops")
def test_kernels_of_the_first_bench_case_compile_cleanly_for_sm_90(ops: Sequence[str]) -> None:
    """Two processes, one for each worker of `make test`: starting one takes 3 s, as long as compiling an op."""
    compile_for_sm_90(ops, "--first", "1")


@pytest.mark.slow
@pytest.mark.parametrize("op", TRITON)
def test_kernels_of_every_bench_case_compile_cleanly_for_sm_90(op: str) -> None:
    compile_for_sm_90([op])


CODES = """
import re, torch
from bagu.ops.catalogue import SPECS
from bagu.ops.inspect.offline import compile_launch, disassemble, instructions, launches

found = []
for op in ("rms_norm", "matmul"):
    case = next(c for c in SPECS[op].cases if c.bench)
    found += [compile_launch(one).asm["cubin"] for one in launches(SPECS[op], case, torch.bfloat16)]
names = lambda code: re.findall(r"/\\*[0-9a-f]{4,}\\*/ +(?:@!?\\w+ +)?([A-Z][A-Z0-9.]*)", code)
assert len(found) > 3 and len(set(found)) > 3
for cubin, code in zip(found, instructions(found), strict=True):
    assert names(code) == names(disassemble(cubin)) != []
"""


@pytest.mark.slow
def test_kernels_disassembled_together_have_the_instructions_of_each_alone() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", CODES], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


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
