"""Reports of `bagu doctor` built by hand: a healthy node of eight GPUs, a laptop, and variants of both."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

from rich.console import Console

from bagu.machine.ceilings import Ceilings
from bagu.machine.device import Gpu, Machine
from bagu.machine.doctor.diagnose import diagnose
from bagu.machine.doctor.gpus import GpuState, NvLink, NvmlState, topology
from bagu.machine.doctor.nccl import Nccl, NcclLibrary
from bagu.machine.doctor.render import render
from bagu.machine.doctor.report import Disk, Report

GIB = 1 << 30
AFFINITY = "0-47,96-143"


def state(index: int, **changes: Any) -> GpuState:
    links = tuple(
        NvLink(link=k, active=True, version=4, speed_mb_s=26562, remote="switch", remote_bus=f"00000000:c{k % 4}:00.0")
        for k in range(18)
    )
    healthy = GpuState(
        index=index,
        name="NVIDIA H200",
        bus=f"00000000:{index:02x}:00.0",
        capability=(9, 0),
        memory_bytes=141 * GIB,
        memory_free_bytes=140 * GIB,
        sm_mhz=1980,
        sm_max_mhz=1980,
        mem_mhz=3201,
        mem_max_mhz=3201,
        temperature_c=41,
        power_w=310.4,
        power_limit_w=700.0,
        throttle=(),
        pcie_gen=5,
        pcie_width=16,
        pcie_max_width=16,
        ecc_corrected=0,
        ecc_uncorrected=0,
        remap_pending=False,
        remap_failed=False,
        cpu_affinity=AFFINITY,
        nvlinks=links,
        problems=(),
    )
    return dataclasses.replace(healthy, **changes)


def nvml_of(*gpus: GpuState, common: str = "SYS") -> NvmlState:
    return NvmlState(gpus=gpus, topology=topology(gpus, lambda i, j: common, lambda i, j: None))


def node(**changes: Any) -> Report:
    """Eight healthy H200s on NVSwitch."""
    gpus = tuple(
        Gpu(
            index=i,
            name="NVIDIA H200",
            capability=(9, 0),
            memory_bytes=141 * GIB,
            multiprocessors=132,
            l2_bytes=60 << 20,
        )
        for i in range(8)
    )
    ceilings = tuple(
        Ceilings(read=4.4e12, write=4.0e12, copy=4.3e12, matmul=7.8e14, dtype="bfloat16", device=f"cuda:{i}")
        for i in range(8)
    )
    healthy = Report(
        environment={
            "bagu": "0.1",
            "commit": "55ee28a3c90a195d9d46763f76f6232869709d31-dirty",
            "python": "3.12.3",
            "torch": "2.11.0+cu130",
            "triton": "3.6.0",
            "numpy": "2.3.5",
            "cuda": "13.0",
            "driver": "580.159.04",
            "os": "Linux-6.18-x86_64-with-glibc2.39",
        },
        machine=Machine(
            name="nvidia-h200-x8",
            cpu="Intel(R) Xeon(R) Platinum 8480C",
            cores=192,
            memory_bytes=2000 * GIB,
            cache_bytes=105 << 20,
            gpus=gpus,
        ),
        memory_available_bytes=1900 * GIB,
        disks=(Disk(use="working folder", path="/data", total_bytes=900 * GIB, free_bytes=800 * GIB),),
        packages={"transformers": "5.17.0", "liger-kernel": None},
        gpu_present=True,
        driver_cuda="13.0",
        nvml=nvml_of(*(state(i) for i in range(8))),
        nvml_problem=None,
        nccl=Nccl(torch="2.28.9", libraries=(library("/env/nvidia/nccl/lib/libnccl.so.2", "2.28.9", loaded=True),)),
        c_compiler="/usr/bin/gcc",
        cxx_compiler="/usr/bin/g++",
        triton_interprets=False,
        fast_dtype="bf16, by the GPU's compute capability",
        native="built and loaded",
        ceilings=ceilings,
        measure_problem=None,
    )
    return dataclasses.replace(healthy, **changes)


def library(path: str, version: str | None, *, loaded: bool = False) -> NcclLibrary:
    return NcclLibrary(path=path, version=version, told_by=version and "ncclGetVersion", loaded=loaded)


def laptop(**changes: Any) -> Report:
    """No GPU, no driver, no Triton, no compiler."""
    r = node()
    bare = dataclasses.replace(
        r,
        environment=r.environment | {"cuda": None, "driver": None, "triton": None, "os": "macOS-15.2-arm64"},
        machine=dataclasses.replace(r.machine, name="cpu-10core-apple-m3", gpus=(), memory_bytes=None),
        memory_available_bytes=None,
        gpu_present=False,
        driver_cuda=None,
        nvml=None,
        nvml_problem="NVML Shared Library Not Found",
        nccl=Nccl(torch=None, libraries=()),
        c_compiler=None,
        cxx_compiler=None,
        ceilings=(),
    )
    return dataclasses.replace(bare, **changes)


def with_env(report: Report, **changes: Any) -> Report:
    return dataclasses.replace(report, environment=report.environment | changes)


def with_gpu(index: int, **changes: Any) -> Report:
    gpus = [state(i, **(changes if i == index else {})) for i in range(8)]
    return node(nvml=nvml_of(*gpus))


def without_gpus(report: Report) -> Report:
    return dataclasses.replace(report, machine=dataclasses.replace(report.machine, gpus=()))


def slow_gpu() -> Report:
    good = node().ceilings
    return node(ceilings=(*good[:3], dataclasses.replace(good[3], matmul=6.0e14), *good[4:]))


def shown(report: Report, width: int) -> str:
    """The text that `bagu doctor` prints for a report."""
    out = io.StringIO()
    render(report, diagnose(report), Console(file=out, width=width, color_system=None))
    return out.getvalue()
