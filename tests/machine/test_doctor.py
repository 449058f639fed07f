"""The doctor: NVML read through a stand-in for pynvml, faults tried on hand-built reports, output at 80 columns."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bagu.machine import doctor, native
from bagu.machine.device import Gpu, Machine, default_device
from bagu.machine.doctor import nccl
from bagu.machine.doctor.diagnose import Finding, diagnose
from bagu.machine.doctor.gpus import GpuState, NvLink, NvmlState, topology
from bagu.machine.doctor.nccl import Nccl, NcclLibrary
from bagu.machine.doctor.nvml import Nvml
from bagu.machine.doctor.render import render, to_json
from bagu.machine.doctor.report import Disk, Report
from bagu.machine.fast_dtype import compute_dtype_name
from bagu.machine.timing import Ceilings

GIB = 1 << 30
AFFINITY = "0-47,96-143"


# --- hand-built machines ----------------------------------------------------------------------------------------------


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


# --- diagnose ---------------------------------------------------------------------------------------------------------


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
    ("report", "level", "words"),
    [
        (without_gpus(with_env(node(driver_cuda="12.4"))), "fault", "speaks CUDA 12.4, torch is built for 13.0"),
        (with_env(node(), cuda="13.2"), "advice", "torch is built for 13.2"),
        (without_gpus(with_env(node(), cuda=None)), "fault", "built without CUDA"),
        (without_gpus(node()), "fault", "torch cannot use it"),
        (node(machine=dataclasses.replace(node().machine, gpus=node().machine.gpus[:2])), "advice", "2 of 8 GPUs"),
        (node(nvml=None, nvml_problem="the module pynvml is not installed"), "advice", "pynvml is not installed"),
        (node(nvml=None, nvml_problem="Driver Not Loaded"), "advice", "NVML could not be asked: Driver Not Loaded"),
        (with_gpu(3, problems=("nvmlDeviceGetName: GPU is lost",)), "fault", "GPU 3 fails"),
        (with_gpu(3, throttle=("idle", "power cap")), "advice", "GPU 3 throttled: power cap"),
        (with_gpu(3, throttle=("hardware thermal slowdown",)), "fault", "throttled: hardware thermal slowdown"),
        (with_gpu(3, throttle=("reason 0x200",)), "advice", "GPU 3 throttled: reason 0x200"),
        (with_gpu(2, ecc_uncorrected=7), "fault", "GPU 2: uncorrected memory errors (7)"),
        (with_gpu(2, ecc_corrected=1), "advice", "GPU 2: corrected memory errors (1)"),
        (with_gpu(2, remap_failed=True), "fault", "no spare memory rows"),
        (with_gpu(2, remap_pending=True), "advice", "wait to be remapped"),
        (with_gpu(5, pcie_width=4), "advice", "GPU 5: PCIe runs on 4 of 16 lanes"),
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
        (slow_gpu(), "fault", "cuda:3: matmul at 600.00 TFLOP/s, its best twin at 780.00 TFLOP/s"),
    ],
)
def test_each_fault_is_found(report: Report, level: str, words: str) -> None:
    findings = diagnose(report)
    found = [finding for finding in findings if words in finding.title]
    assert [finding.level for finding in found] == [level], findings
    assert found[0].advice
    assert "\n" not in found[0].title + found[0].advice
    assert any(f.level == "ok" for f in findings) == all(f.level != "fault" for f in findings)


def test_only_the_driver_is_blamed_when_it_is_too_old() -> None:
    findings = diagnose(without_gpus(node(driver_cuda="12.4", ceilings=())))
    assert [finding.level for finding in findings] == ["fault"]


# --- NVML -------------------------------------------------------------------------------------------------------------


class FakePynvml:
    """pynvml with its own constants and error types, whose functions answer from a table.

    Each call is bound to the real function's signature; what the table does not hold is refused as not supported.
    """

    def __init__(self, answers: dict[str, Callable[..., Any]]) -> None:
        self._real = pytest.importorskip("pynvml")
        self._answers = {"nvmlInit": lambda: None, "nvmlShutdown": lambda: None} | answers

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if not inspect.isfunction(real):
            return real

        def call(*args: Any) -> Any:
            inspect.signature(real).bind(*args)
            if name not in self._answers:
                raise self._real.NVMLError(self._real.NVML_ERROR_NOT_SUPPORTED)
            return self._answers[name](*args)

        call.__name__ = name
        return call

    def error(self, code: str) -> Exception:
        return self._real.NVMLError(getattr(self._real, f"NVML_ERROR_{code}"))

    def state(self) -> NvmlState:
        with Nvml(self) as nvml:
            return nvml.state()


def answers_of_a_node(count: int, links: int) -> dict[str, Callable[..., Any]]:
    """Handles are the indices; every link goes to a switch."""
    pynvml = pytest.importorskip("pynvml")

    def link_state(handle: int, link: int) -> int:
        if link >= links:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return 1

    def fields(handle: int, wanted: list[tuple[int, int]]) -> Any:
        values = (pynvml.c_nvmlFieldValue_t * len(wanted))()
        for value, (field, _link) in zip(values, wanted, strict=True):
            assert field == pynvml.NVML_FI_DEV_NVLINK_GET_SPEED
            value.value.uiVal = 26562
        return values

    return {
        "nvmlDeviceGetCount": lambda: count,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=f"00000000:{handle:02X}:00.0".encode()),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=141 * GIB, free=140 * GIB, used=GIB),
        "nvmlDeviceGetClockInfo": lambda handle, kind: {pynvml.NVML_CLOCK_SM: 345, pynvml.NVML_CLOCK_MEM: 3201}[kind],
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 1980 if kind == pynvml.NVML_CLOCK_SM else 3201,
        "nvmlDeviceGetPowerUsage": lambda handle: 77_500,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x1 | 0x40 | 1 << 40,
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 5 * kind + counter,
        "nvmlDeviceGetRemappedRows": lambda handle: (0, 1, 1, 0),
        "nvmlDeviceGetCpuAffinity": lambda handle, words: [(1 << 48) - 1, ((1 << 48) - 1) << 32, 0xFFFF, *([0] * 13)],
        "nvmlDeviceGetNvLinkState": link_state,
        "nvmlDeviceGetNvLinkVersion": lambda handle, link: 4,
        "nvmlDeviceGetNvLinkRemoteDeviceType": lambda handle, link: pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH,
        "nvmlDeviceGetFieldValues": fields,
        "nvmlDeviceGetTopologyCommonAncestor": lambda a, b: pynvml.NVML_TOPOLOGY_SYSTEM,
        "nvmlDeviceGetP2PStatus": lambda a, b, kind: pynvml.NVML_P2P_STATUS_OK,
    }


def test_nvml_reads_a_switched_node() -> None:
    nvml = FakePynvml(answers_of_a_node(8, 18)).state()
    assert [[*row] for row in nvml.topology] == [["X" if i == j else "NV18" for j in range(8)] for i in range(8)]
    gpu = nvml.gpus[5]
    assert (gpu.index, gpu.name, gpu.bus, gpu.capability) == (5, "NVIDIA H200", "00000000:05:00.0", (9, 0))
    assert (gpu.sm_mhz, gpu.sm_max_mhz, gpu.mem_mhz) == (345, 1980, 3201)
    assert (gpu.power_w, gpu.power_limit_w) == (77.5, 700.0)
    assert gpu.throttle == ("idle", "hardware thermal slowdown", "reason 0x10000000000")
    assert (gpu.ecc_corrected, gpu.ecc_uncorrected, gpu.remap_pending, gpu.remap_failed) == (0, 5, True, False)
    assert gpu.cpu_affinity == AFFINITY
    assert len(gpu.nvlinks) == 18
    assert gpu.nvlinks[17].speed_mb_s == 26562
    assert gpu.temperature_c is None  # not in the table: refused
    assert gpu.problems == ()


def test_refused_fields_are_none_and_shown_as_such() -> None:
    nvml = FakePynvml({"nvmlDeviceGetCount": lambda: 2, "nvmlDeviceGetHandleByIndex": lambda index: index}).state()
    gpu = dataclasses.asdict(nvml.gpus[0])
    assert {gpu.pop("index"), gpu.pop("nvlinks"), gpu.pop("problems")} == {0, ()}
    assert set(gpu.values()) == {None}
    assert nvml.topology == (("X", None), (None, "X"))
    assert "n/a" in shown(node(nvml=nvml), 80)


def test_lost_gpu_is_a_fault_and_the_others_are_read() -> None:
    answers = answers_of_a_node(3, 18)
    fake = FakePynvml(answers)

    def handle(index: int) -> int:
        if index == 1:
            raise fake.error("GPU_IS_LOST")
        return index

    fake._answers["nvmlDeviceGetHandleByIndex"] = handle
    nvml = fake.state()
    assert nvml.gpus[1].problems == ("nvmlDeviceGetHandleByIndex: GPU is lost",)
    assert nvml.topology[0] == ("X", None, "NV18")
    assert any("GPU 1 fails" in finding.title for finding in diagnose(node(nvml=nvml)))


def test_links_between_gpus_are_counted_per_pair() -> None:
    """Four GPUs in two pairs: four links inside a pair, none across, as with NVLink bridges."""
    pynvml = pytest.importorskip("pynvml")
    answers = answers_of_a_node(4, 4) | {
        "nvmlDeviceGetNvLinkRemoteDeviceType": lambda handle, link: pynvml.NVML_NVLINK_DEVICE_TYPE_GPU,
        "nvmlDeviceGetNvLinkRemotePciInfo": lambda handle, link: SimpleNamespace(
            busId=f"00000000:{handle ^ 1:02X}:00.0".encode()
        ),
    }
    nvml = FakePynvml(answers).state()
    assert nvml.topology == (
        ("X", "NV4", "SYS", "SYS"),
        ("NV4", "X", "SYS", "SYS"),
        ("SYS", "SYS", "X", "NV4"),
        ("SYS", "SYS", "NV4", "X"),
    )
    assert "GPU 1 × 4" in shown(node(nvml=nvml), 80)


@pytest.mark.parametrize(("remote", "peers", "cell"), [("UNKNOWN", "OK", "NV18"), ("SWITCH", "NOT_SUPPORTED", "SYS")])
def test_hidden_ends_count_for_peers_and_a_dead_fabric_does_not(remote: str, peers: str, cell: str) -> None:
    pynvml = pytest.importorskip("pynvml")
    answers = answers_of_a_node(2, 18) | {
        "nvmlDeviceGetNvLinkRemoteDeviceType": lambda h, link: getattr(pynvml, f"NVML_NVLINK_DEVICE_TYPE_{remote}"),
        "nvmlDeviceGetP2PStatus": lambda a, b, kind: getattr(pynvml, f"NVML_P2P_STATUS_{peers}"),
    }
    assert FakePynvml(answers).state().topology == (("X", cell), (cell, "X"))


# --- NCCL -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "text"), [(22809, "2.28.9"), (2804, "2.8.4"), (21105, "2.11.5")])
def test_nccl_version_number(code: int, text: str) -> None:
    assert nccl.version_text(code) == text


def test_every_nccl_file_is_found_once(tmp_path: Path) -> None:
    wheel, system = tmp_path / "wheel", tmp_path / "system"
    wheel.mkdir()
    system.mkdir()
    (wheel / "libnccl.so.2").write_bytes(b"\x7fELF" + bytes(64) + b"NCCL version 2.28.9+cuda13.0" + bytes(64))
    (system / "libnccl.so.2.27.3").write_bytes(b"")
    (system / "libnccl.so.2").symlink_to(system / "libnccl.so.2.27.3")
    (system / "libnccl-net.so").write_bytes(b"a plugin, not NCCL")
    found = nccl.find_nccl([wheel, system, tmp_path / "absent"]).libraries
    ours = [(lib.version, lib.told_by, lib.loaded) for lib in found if str(tmp_path) in lib.path]
    assert ours == [("2.27.3", "its name", False), ("2.28.9", "its text", False)]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_nccl_is_asked_for_its_version(tmp_path: Path) -> None:
    source, lib = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int *v) { *v = 22703; return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(lib), str(source)], check=True)
    assert nccl.library_version(lib) == ("2.27.3", "ncclGetVersion")


# --- output -----------------------------------------------------------------------------------------------------------


def shown(report: Report, width: int) -> str:
    out = io.StringIO()
    render(report, diagnose(report), Console(file=out, width=width, color_system=None))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("report", [node(), laptop(), node(nvml=None), with_gpu(1, throttle=("power brake",))])
def test_output_fits_and_is_whole(report: Report, width: int) -> None:
    text = shown(report, width)
    assert max(len(line) for line in text.splitlines()) <= width
    if report.nvml:
        assert text.count("NV18") == 56
        assert text.count("18 of 18") == 8
        assert AFFINITY in text
        assert text.count("140.0/141.0 GiB") == 8
        assert "…" not in text
        assert "26.56 GB/s" in text
    if report.ceilings:
        assert "4.30 TB/s" in text
        assert "780.00 TFLOP/s" in text
    for finding in diagnose(report):
        assert finding.title.split()[0] in text


def test_json_holds_report_and_findings() -> None:
    value = json.loads(to_json(node(), [Finding("ok", "a", "b")]))
    assert value["findings"] == [{"level": "ok", "title": "a", "advice": "b"}]
    assert value["report"]["nvml"]["gpus"][7]["nvlinks"][17]["remote"] == "switch"
    assert value["report"]["ceilings"][0]["copy"] == 4.3e12


@pytest.mark.parametrize("as_json", [True, False])
def test_doctor_on_this_machine(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor.main(as_json=as_json, measure=False)
    out = capsys.readouterr().out
    if as_json:
        value = json.loads(out)
        assert status == any(finding["level"] == "fault" for finding in value["findings"])
        assert value["report"]["ceilings"] == []
        assert value["report"]["machine"]["cpu"] not in ("aarch64", "x86_64", "arm64", "unknown CPU")
        assert value["report"]["fast_dtype"].startswith(compute_dtype_name(default_device()))
        assert value["report"]["native"]
    else:
        assert "Findings" in out and "fast dtype" in out and "C++ decode" in out


def test_the_state_of_the_cpp_build_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGU_NATIVE", "0")
    assert native.status("serve/cpu/step.cpp") == "off: BAGU_NATIVE=0"
    monkeypatch.setenv("BAGU_NATIVE", "1")
    monkeypatch.setenv("CXX", "no-such-compiler")
    native.library.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert "no-such-compiler" in native.status("serve/cpu/step.cpp")
    finally:
        native.library.cache_clear()


def test_status_is_one_for_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "collect", lambda *, measure: with_gpu(0, ecc_uncorrected=1))
    assert doctor.main(as_json=True, measure=False) == 1
    monkeypatch.setattr(doctor, "collect", lambda *, measure: node())
    assert doctor.main(as_json=True, measure=False) == 0
