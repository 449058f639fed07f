"""The doctor's findings on hand-built reports: every fault is found, and a healthy node has none."""

from __future__ import annotations

import dataclasses

import pytest
from sample_reports import (
    GIB,
    laptop,
    library,
    node,
    nvml_of,
    slow_gpu,
    state,
    with_env,
    with_gpu,
    without_gpus,
)  # fmt: skip

from bagu.machine.doctor.diagnose import diagnose
from bagu.machine.doctor.nccl import Nccl
from bagu.machine.doctor.report import Disk, Report


def test_healthy_node_has_no_finding() -> None:
    assert [finding.level for finding in diagnose(node())] == ["ok"]


def test_no_gpu_is_advice() -> None:
    findings = diagnose(laptop())
    assert {finding.level for finding in findings} == {"advice", "ok"}
    assert findings[0].title == "no GPU"


DOWN = tuple(dataclasses.replace(link, active=False) for link in state(0).nvlinks)
PCIE = nvml_of(state(0, nvlinks=()), state(1, nvlinks=()), common="PHB")
TWO_NCCL = Nccl(
    torch="2.28.9", libraries=(library("/a/libnccl.so.2", "2.28.9", loaded=True), library("/b/libnccl.so.2", "2.9.6"))
)


@pytest.mark.parametrize(
    ("report", "level", "title"),
    [
        (without_gpus(with_env(node(driver_cuda="12.4"))), "fault", "supports CUDA 12.4, torch is built for 13.0"),
        (with_env(node(), cuda="13.2"), "advice", "torch is built for 13.2"),
        (without_gpus(with_env(node(), cuda=None)), "fault", "built without CUDA"),
        (without_gpus(node()), "fault", "torch cannot use it"),
        (node(machine=dataclasses.replace(node().machine, gpus=node().machine.gpus[:2])), "advice", "2 of 8 GPUs"),
        (node(nvml=None, nvml_problem="the module pynvml is not installed"), "advice", "pynvml is not installed"),
        (node(nvml=None, nvml_problem="Driver Not Loaded"), "advice", "NVML is not available: Driver Not Loaded"),
        (with_gpu(3, problems=("nvmlDeviceGetName: GPU is lost",)), "fault", "GPU 3 fails"),
        (with_gpu(3, throttle=("idle", "power cap")), "advice", "GPU 3 throttled: power cap"),
        (with_gpu(3, throttle=("hardware thermal slowdown",)), "fault", "throttled: hardware thermal slowdown"),
        (with_gpu(3, throttle=("reason 0x200",)), "advice", "GPU 3 throttled: reason 0x200"),
        (with_gpu(2, ecc_uncorrected=7), "fault", "GPU 2: uncorrected memory errors (7)"),
        (with_gpu(2, ecc_corrected=1), "advice", "GPU 2: corrected memory errors (1)"),
        (with_gpu(2, remap_failed=True), "fault", "no spare memory rows"),
        (with_gpu(2, remap_pending=True), "advice", "wait to be remapped"),
        (with_gpu(5, pcie_width=4), "advice", "GPU 5: PCIe uses 4 of 16 lanes"),
        (with_gpu(5, memory_free_bytes=GIB), "advice", "GPU 5: 1.0 GiB of memory free"),
        (with_gpu(1, nvlinks=DOWN), "fault", "no NVLink between 7 of 28 GPU pairs (0-1, 1-2, 1-3, 1-4, …)"),
        (with_gpu(1, nvlinks=(*state(1).nvlinks[1:], DOWN[0])), "fault", "GPU 1: some NVLinks are down"),
        (node(nvml=PCIE), "advice", "no NVLink between 1 of 1 GPU pairs (0-1)"),
        (node(nccl=TWO_NCCL), "fault", "2 NCCL versions: 2.9.6, 2.28.9; torch loads 2.28.9"),
        (laptop(nccl=TWO_NCCL), "advice", "2 NCCL versions"),
        (with_env(node(), triton=None), "fault", "Triton is missing"),
        (node(c_compiler=None), "fault", "no C compiler"),
        (node(triton_interprets=True), "advice", "TRITON_INTERPRET"),
        (with_env(node(), numpy="2.5.2"), "advice", "does not work with NumPy 2.5.2"),
        (with_env(node(triton_interprets=True), numpy="2.4.0"), "fault", "does not work with NumPy 2.4.0"),
        (node(memory_available_bytes=GIB // 4), "fault", "0.2 of 2000.0 GiB of memory free"),
        (node(disks=(Disk(use="x", path="/x", total_bytes=GIB, free_bytes=GIB // 2),)), "fault", "0.5 GiB free"),
        (node(cxx_compiler=None), "advice", "no C++ compiler"),
        (node(ceilings=(), measure_problem="CUDA out of memory."), "fault", "CUDA out of memory"),
        (slow_gpu(), "fault", "cuda:3: matmul at 600.00 TFLOP/s, the best GPU at 780.00 TFLOP/s"),
    ],
)
def test_each_fault_is_found(report: Report, level: str, title: str) -> None:
    findings = diagnose(report)
    found = [finding for finding in findings if title in finding.title]
    assert [finding.level for finding in found] == [level], findings
    assert found[0].advice
    assert "\n" not in found[0].title + found[0].advice
    assert any(f.level == "ok" for f in findings) == all(f.level != "fault" for f in findings)


def test_an_old_driver_is_the_only_fault() -> None:
    findings = diagnose(without_gpus(node(driver_cuda="12.4", ceilings=())))
    assert [finding.level for finding in findings] == ["fault"]
