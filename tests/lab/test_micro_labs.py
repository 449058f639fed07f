"""Micro-labs: the kernels compile and contain what is measured; planted numbers decide."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from bagu.errors import BaguError
from bagu.lab.core import Row
from bagu.lab.gpu import tma
from bagu.lab.parts import cuda

LABS = (
    "memory_hierarchy", "cache_bandwidth", "coalescing", "bank_conflicts", "warp_divergence", "reduction",
    "latency_hiding", "exp_throughput", "atomics", "waves", "tiled_transpose",
)  # fmt: skip


def rows_of(columns: str, *values: tuple[object, ...]) -> list[Row]:
    return [dict(zip(columns.split(), row, strict=True)) for row in values]  # type: ignore[arg-type]


def paths(lane: float, warp: float) -> list[Row]:
    return rows_of(
        "way paths time", ("by lane", 1, 6.0), ("by lane", 16, lane), ("by warp", 1, 6.0), ("by warp", 16, warp),
        ("selected", 1, 6.0), ("selected", 16, 6.0),
    )  # fmt: skip


def rates(four_chains: float) -> list[Row]:
    return rows_of("warps chains gflops", (1, 1, 10.0), (1, 2, 20.0), (1, 4, four_chains), (4, 1, 40.0), (4, 4, 99.0))


def exps(unit: float, both: float) -> list[Row]:
    ways = ("ex2 unit", "polynomial", "3 unit + 1 polynomial", "multiply-add")
    return rows_of("way per_cycle", *zip(ways, (unit, 12.0, both, 120.0), strict=True))


def transposed(*rate: float) -> list[Row]:
    return rows_of("way gb_per_s", *zip(("naive", "tiled", "padded", "torch"), (*rate, 600.0), strict=True))


def products(second: float | None) -> list[Row]:
    return rows_of("way n tflops error reason", ("a", 8192, 500.0, 0.0, ""), ("b", 8192, second, 0.0, "no"))


# for each lab, rows for which the claim holds, and rows for which it does not
PLANTED: dict[str, tuple[list[Row], list[Row]]] = {
    "memory_hierarchy": (
        rows_of("way size_bytes latency_cycles", ("past L1", 1 << 14, 30.0), ("past L1", 1 << 29, 700.0)),
        rows_of("way size_bytes latency_ns", ("C++", 1 << 14, 30.0), ("C++", 1 << 29, 60.0)),
    ),
    "cache_bandwidth": (
        rows_of("size_bytes gb_per_s", (1 << 20, 9000.0), (1 << 30, 4000.0)),
        rows_of("size_bytes gb_per_s", (1 << 20, 4100.0), (1 << 30, 4000.0)),
    ),
    "coalescing": (
        rows_of("stride offset gb_per_s", (1, 0, 4000.0), (32, 0, 500.0), (1, 1, 3900.0)),
        rows_of("stride offset gb_per_s", (1, 0, 4000.0), (32, 0, 3000.0), (1, 1, 3900.0)),
    ),
    "bank_conflicts": (
        rows_of("stride ways cycles", (1, 1, 1.0), (32, 32, 32.5), (33, 1, 1.0)),
        rows_of("stride ways cycles", (1, 1, 1.0), (32, 32, 11.0), (33, 1, 1.0)),
    ),
    "warp_divergence": (paths(95.0, 6.1), paths(6.0, 95.0)),
    "reduction": (
        rows_of("way sum_ns error", ("shared tree", 400.0, 0.0), ("shuffles", 200.0, 0.0)),
        rows_of("way sum_ns error", ("shared tree", 200.0, 0.0), ("shuffles", 200.0, 0.0)),
    ),
    "latency_hiding": (rates(41.0), rates(12.0)),
    "exp_throughput": (exps(16.0, 19.0), exps(64.0, 70.0)),
    "atomics": (
        rows_of(
            "way bins adds_per_s", ("global", 1, 1e9), ("global", 99, 9e9), ("shared", 1, 1e9), ("shared", 99, 9e9)
        ),
        rows_of(
            "way bins adds_per_s", ("global", 1, 8e9), ("global", 99, 9e9), ("shared", 1, 1e9), ("shared", 99, 9e9)
        ),
    ),
    "waves": (
        rows_of("blocks fit waves predicted", (1, 264, 1.0, 1), (265, 264, 2.02, 2)),
        rows_of("blocks fit waves predicted", (1, 264, 1.0, 1), (265, 264, 1.02, 2)),
    ),
    "tiled_transpose": (transposed(600.0, 2000.0, 3500.0), transposed(600.0, 500.0, 500.0)),
    "l2_swizzle": (
        rows_of("n round group tflops", (8192, 0, 1, 500.0), (8192, 0, 8, 650.0)),
        rows_of("n round group tflops", (8192, 0, 1, 600.0), (8192, 0, 8, 601.0)),
    ),
    "tma": (products(600.0), products(500.0)),
    "warp_specialization": (products(600.0), products(500.0)),
}


@pytest.mark.slow  # nvcc takes seconds for each
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc: NVRTC comes with torch for CUDA only")
@pytest.mark.parametrize("name", LABS)
def test_the_kernels_compile_and_have_the_instructions(name: str, tmp_path: Path) -> None:
    lab = import_module(f"bagu.lab.gpu.{name}")
    source, cubin = tmp_path / "lab.cu", tmp_path / "lab.cubin"
    source.write_text(lab.SOURCE)
    subprocess.run(["nvcc", "-arch=sm_90a", "-cubin", "-o", str(cubin), str(source)], check=True, capture_output=True)
    expects = re.search(r"expects=\(([^)]*)\)", Path(lab.__file__).read_text())
    assert expects is not None
    names = re.findall(r'"([^"]+)"', expects[1])
    cuda.check_code(cubin.read_bytes(), names)
    with pytest.raises(BaguError, match="removed HMMA"):
        cuda.check_code(cubin.read_bytes(), ["HMMA"])


def test_moved_clocks_leave_the_claim_open() -> None:
    found = import_module("bagu.lab.gpu.waves").verdict(PLANTED["waves"][0])
    clocks: list[Row] = [{"clock_mhz": mhz} for mhz in (1980.0, 1975.0)]
    assert cuda.steady(found, clocks) == found
    assert cuda.steady(found, [*clocks, {"clock_mhz": 1500.0}]).kind == "not decided"


def test_rounds_that_do_not_agree_leave_the_claim_open() -> None:
    assert tma.verdict([*products(600.0), *products(520.0)]).kind == "not decided"
    rounds = rows_of("n round group tflops", (8, 0, 1, 500.0), (8, 0, 8, 650.0), (8, 1, 1, 500.0), (8, 1, 8, 501.0))
    verdict = import_module("bagu.lab.gpu.l2_swizzle").verdict
    assert verdict(rounds).kind == "not decided"
    others = rows_of("n round group tflops", (4, 0, 1, 9.0), (4, 0, 8, 9.0), (16, 0, 1, 9.0), (16, 0, 8, 12.0))
    assert verdict([*rounds, *others]).kind == "holds only where"


def test_a_way_that_does_not_compile_leaves_the_claim_open() -> None:
    assert tma.verdict(products(None)).kind == "not decided"


def test_a_cpu_says_nothing_of_warps() -> None:
    rows = rows_of("way paths time", ("sorted", 2, 1.0), ("random", 2, 5.0))
    assert import_module("bagu.lab.gpu.warp_divergence").verdict(rows).kind == "not decided"
