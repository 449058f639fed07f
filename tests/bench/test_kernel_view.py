"""`bagu ops show --kernel`: kernels compiled without a GPU, their facts, and the difference of two tunings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bagu.bench.kernel_view import parse_tuning
from bagu.bench.occupancy import occupancy
from bagu.errors import ArgumentError, UnknownName
from bagu.ops.catalogue import spec

# All commands run in one process, which starts in 4 s. It is not this one: kernels cannot be compiled where
# TRITON_INTERPRET is set.
BAD_INPUT = {
    "an architecture": (["rms_norm", "--kernel", "--arch", "sm_1"], "no architecture 'sm_1'"),
    "an option": (["rms_norm", "--kernel", "--config", "warps=4"], "no tuning option of rms_norm 'warps'"),
    "a backend": (["linear_attention", "--kernel"], "no backend of linear_attention 'triton'"),
}
COMMANDS = {
    "kernels": ["scale_norm", "--kernel", "--json"],
    "gluon": ["conv2d", "--kernel", "--json"],
    "difference": ["dequantize_int8", "--diff", "num_warps=4", "num_warps=8"],
    **{name: argv for name, (argv, _) in BAD_INPUT.items()},
}
RUN = """
import contextlib, io, json, sys
from dataclasses import asdict
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from bagu.bench import tune_compile
from bagu.cli import main
from bagu.ops.inspect import gate
from bagu.ops.catalogue import spec
from bagu.ops.inspect.offline import launches

def run(command, *argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = command(*argv)
        except SystemExit as end:
            code = end.code
    return {"code": code or 0, "out": out.getvalue(), "err": err.getvalue()}

class Driver:  # as much of Triton's driver as a launch needs to find its kernel: an H200 that is not there
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

def tuner():  # what the tuner's processes make of the same kernels, and whether launches find them in Triton's cache
    case, kind = next(c for c in spec("scale_norm").cases if c.bench), torch.bfloat16
    jobs = [tune_compile.Job(op="scale_norm", case=case, dtype=kind, step=step, options=options, arch="sm_90")
            for step, options in (("forward", ()), ("backward", ()), ("forward", (("num_warps", 3),)))]
    builds = [asdict(tune_compile.build(job)) for job in jobs]
    hits = []
    knobs.compilation.listener = lambda **facts: hits.append(facts["cache_hit"])
    driver.set_active(Driver())
    for one in launches(spec("scale_norm"), case, kind):
        one.fn.run(*[one.args.get(p.name, p.default) for p in one.fn.params], grid=one.grid, warmup=True, **one.options)
    return {"builds": builds, "hits": hits}

found = {name: run(main, ["ops", "show", *argv]) for name, argv in json.loads(sys.argv[1]).items()}
found["gate"] = run(gate.main, ["--first", "1", "scale_norm"])
found["tuner"] = {"code": 0, "out": json.dumps(tuner()), "err": ""}
print(json.dumps(found))
"""


class Ran(NamedTuple):
    code: int
    out: str
    err: str
    cwd: Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Each command of COMMANDS, and the compile gate of the same kernels."""
    cwd = tmp_path_factory.mktemp("kernels")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"COLUMNS": "160"}
    command = [sys.executable, "-c", RUN, json.dumps(COMMANDS)]
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: Ran(**each, cwd=cwd) for name, each in json.loads(done.stdout).items()}


@pytest.fixture(scope="module")
def shown(ran: dict[str, Ran]) -> tuple[list[dict[str, Any]], Path]:
    run = ran["kernels"]
    assert run.code == 0, run.err
    return json.loads(run.out), run.cwd


@pytest.mark.slow
def test_every_kernel_has_its_stages_in_a_folder(shown: tuple[list[dict[str, Any]], Path]) -> None:
    kernels, cwd = shown
    assert {k["step"] for k in kernels} == {"forward", "backward"}
    for k in kernels:
        stages = {path.suffix: path.read_text() for path in (cwd / k["folder"]).iterdir()}
        assert set(stages) == {".ttir", ".ttgir", ".llir", ".ptx", ".sass"}
        assert ".target sm_90a" in stages[".ptx"] and k["kernel"] in stages[".ttir"] and "STG.E" in stages[".sass"]


@pytest.mark.slow
def test_a_gluon_kernel_has_all_stages_but_ttir(ran: dict[str, Ran]) -> None:
    run = ran["gluon"]
    assert run.code == 0, run.err
    kernel = next(k for k in json.loads(run.out) if k["kernel"] == "hopper_kernel")
    assert {path.suffix for path in (run.cwd / kernel["folder"]).iterdir()} == {".ttgir", ".llir", ".ptx", ".sass"}


@pytest.mark.slow
def test_the_facts_are_those_of_the_compile_gate(shown: tuple[list[dict[str, Any]], Path], ran: dict[str, Ran]) -> None:
    assert ran["gate"].code == 0, ran["gate"].err
    lines = ran["gate"].out.splitlines()
    gate = [(w[2], int(w[3]), int(w[5]), int(w[7])) for w in (line.split() for line in lines if "wide" in line)]
    assert gate == [(k["kernel"], k["registers"], k["spills"], k["shared"]) for k in shown[0]]


@pytest.mark.slow
def test_a_launch_finds_in_the_cache_what_was_compiled_without_a_gpu(ran: dict[str, Ran]) -> None:
    hits = json.loads(ran["tuner"].out)["hits"]
    assert len(hits) >= 2 and all(hits)


@pytest.mark.slow
def test_a_difference_of_tunings_names_what_changed(ran: dict[str, Ran]) -> None:
    run = ran["difference"]
    assert run.code == 0, run.err
    words = [line.split() for line in run.out.splitlines()]
    assert ["warps", "4", "8"] in [w[-3:] for w in words]
    assert (run.cwd / "kernels/dequantize_int8/a-num_warps=4").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_sentence(name: str, ran: dict[str, Ran]) -> None:
    run = ran[name]
    assert run.code != 0 and BAD_INPUT[name][1] in run.err and "Traceback" not in run.err


def test_tunings_are_read_by_step() -> None:
    norm = spec("rms_norm")
    assert parse_tuning(norm, "num_warps=8") == {"forward": {"num_warps": 8}, "backward": {"num_warps": 8}}
    assert parse_tuning(norm, "backward.num_warps=4, block_m=2") == {
        "backward": {"num_warps": 4},
        "forward": {"block_m": 2},
    }
    with pytest.raises(ArgumentError, match="expected OPTION=NUMBER"):
        parse_tuning(norm, "num_warps=many")


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs", "limit"),
    [  # by NVIDIA's occupancy calculator for compute capability 9.0
        (32, 0, 8, 8, "registers"),
        (255, 0, 8, 1, "registers"),
        (16, 100_000, 4, 2, "shared memory"),
        (16, 0, 1, 32, "blocks"),
        (24, 0, 16, 4, "warps"),
    ],
)
def test_occupancy_is_limited_by_the_scarcest_resource(
    registers: int, shared: int, warps: int, programs: int, limit: str
) -> None:
    found = occupancy("sm_90", registers=registers, shared=shared, warps=warps)
    assert (found.programs, found.limit) == (programs, limit)
    assert found.share == programs * warps / 64


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(UnknownName, match="sm_999"):
        occupancy("sm_999", registers=1, shared=0, warps=1)
