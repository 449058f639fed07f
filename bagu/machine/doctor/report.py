"""Collect: read everything `bagu doctor` reports into one value; `dataclasses.asdict` turns it into JSON."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bagu.machine import device, native
from bagu.machine.ceilings import Ceilings, measure_ceilings
from bagu.machine.device import Machine
from bagu.machine.doctor.gpus import NvmlState
from bagu.machine.doctor.nccl import Nccl, find_nccl
from bagu.machine.doctor.nvml import Nvml
from bagu.machine.environment import environment, package_version
from bagu.machine.fast_dtype import compute_dtype_name, matmul_rates

PACKAGES = (
    "nvidia-ml-py",
    "transformers",
    "tokenizers",
    "safetensors",
    "liger-kernel",
    "flash-attn",
    "matplotlib",
    "rich",
    "typer",
)


@dataclass(frozen=True, kw_only=True)
class Disk:
    use: str
    path: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """`environment` is `machine.environment`: the versions of torch, Triton, NumPy, CUDA and the driver. `packages` are
    the optional packages bagu can use. `gpu_present` is about the hardware, `machine.gpus` are the GPUs torch can use.
    `nvml` is None if NVML is not available; `nvml_problem` then has the reason. `fast_dtype` is the default compute
    dtype of models, `native` the state of the C++ CPU decoder. `ceilings` has one entry per GPU, or one for the CPU; it
    is empty if measuring was not requested or failed, and `measure_problem` then has the reason."""

    environment: dict[str, Any]
    machine: Machine
    memory_available_bytes: int | None
    disks: tuple[Disk, ...]
    packages: dict[str, str | None]
    gpu_present: bool
    driver_cuda: str | None
    nvml: NvmlState | None
    nvml_problem: str | None
    nccl: Nccl
    c_compiler: str | None
    cxx_compiler: str | None
    triton_interprets: bool
    fast_dtype: str
    native: str
    ceilings: tuple[Ceilings, ...]
    measure_problem: str | None


def collect(*, measure: bool = True) -> Report:
    """Read the facts of this machine; with `measure` also time its memory and matrix units (2 s, plus 2 s per GPU)."""
    machine = device.this_machine()
    ceilings, measure_problem = _measured(machine) if measure else ((), None)
    _start_load(ceilings)
    nvml, nvml_problem = _nvml_state()
    return Report(
        environment=environment(),
        machine=machine,
        memory_available_bytes=device.available_memory(),
        disks=_disks(),
        packages={name: package_version(name) for name in PACKAGES},
        gpu_present=bool(nvml and nvml.gpus) or device.gpu_in_system(),
        driver_cuda=device.driver_cuda(),
        nvml=nvml,
        nvml_problem=nvml_problem,
        nccl=find_nccl(),
        c_compiler=device.c_compiler(),
        cxx_compiler=device.cxx_compiler(),
        triton_interprets=device.triton_interprets(),
        fast_dtype=_fast_dtype(),
        native=native.status("serve/cpu/step.cpp"),
        ceilings=ceilings,
        measure_problem=measure_problem,
    )


def _fast_dtype() -> str:
    """The dtype that `auto` selects, and the reason."""
    where = device.default_device()
    name = compute_dtype_name(where)
    if where.type == "cuda":
        return f"{name}, by the GPU's compute capability"
    rates = matmul_rates()
    other, ratio = ("fp32", rates.bf16 / rates.fp32) if name == "bf16" else ("bf16", rates.fp32 / rates.bf16)
    return f"{name}, measured: {ratio:.3g} × as many FLOP/s as {other}"


def _measured(machine: Machine) -> tuple[tuple[Ceilings, ...], str | None]:
    where = [f"cuda:{gpu.index}" for gpu in machine.gpus] or ["cpu"]
    try:
        ceilings = tuple(measure_ceilings(name, quick=True) for name in where)
        torch.cuda.empty_cache()  # NVML reports free memory next
        return ceilings, None
    except RuntimeError as error:  # out of memory, or a GPU that fails under load: report it as a finding
        return (), str(error).splitlines()[0]


def _start_load(ceilings: tuple[Ceilings, ...]) -> None:
    """Submit half a second of matrix products to every measured GPU and return at once, so that NVML reads clocks and
    throttle reasons under load. An idle GPU runs at idle clocks and does not throttle."""
    side = 8192
    for one in ceilings:
        if one.device != "cpu":
            a, b = (torch.randn(side, side, device=one.device, dtype=getattr(torch, one.dtype)) for _ in range(2))
            c = torch.empty_like(a)
            for _ in range(int(0.5 * one.matmul / (2 * side**3))):
                torch.mm(a, b, out=c)


def _nvml_state() -> tuple[NvmlState | None, str | None]:
    try:
        import pynvml
    except ImportError:
        return None, "the module pynvml is not installed"
    try:
        with Nvml(pynvml) as nvml:
            return nvml.state(), None
    except pynvml.NVMLError as error:
        return None, str(error)


def _disks() -> tuple[Disk, ...]:
    disks: dict[int, Disk] = {}  # by file system, to list each one once
    for use, path in (("working folder", Path.cwd()), ("temporary files", Path(tempfile.gettempdir()))):
        usage = shutil.disk_usage(path)
        disks.setdefault(
            path.stat().st_dev, Disk(use=use, path=str(path), total_bytes=usage.total, free_bytes=usage.free)
        )
    return tuple(disks.values())
