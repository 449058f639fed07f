"""The doctor reads NVML (through a fake pynvml) and finds the NCCL libraries."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sample_reports import AFFINITY, GIB, node, shown

from bagu.machine.doctor import nccl
from bagu.machine.doctor.diagnose import diagnose
from bagu.machine.doctor.gpus import NvmlState
from bagu.machine.doctor.nvml import Nvml


class FakePynvml:
    """A fake pynvml: real constants and error types, functions that return values from a table.

    Each call is checked against the signature of the real function; a function not in the table is "not supported".
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


def test_nvml_reads_a_node_with_nvswitch() -> None:
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
    assert gpu.temperature_c is None  # not in the table: not supported
    assert gpu.problems == ()


def test_unsupported_fields_are_none_and_print_as_na() -> None:
    nvml = FakePynvml({"nvmlDeviceGetCount": lambda: 2, "nvmlDeviceGetHandleByIndex": lambda index: index}).state()
    gpu = dataclasses.asdict(nvml.gpus[0])
    assert {gpu.pop("index"), gpu.pop("nvlinks"), gpu.pop("problems")} == {0, ()}
    assert set(gpu.values()) == {None}
    assert nvml.topology == (("X", None), (None, "X"))
    assert "n/a" in shown(node(nvml=nvml), 80)


def test_a_lost_gpu_is_a_fault_and_others_are_still_read() -> None:
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
def test_links_with_hidden_ends_count_only_for_peers(remote: str, peers: str, cell: str) -> None:
    pynvml = pytest.importorskip("pynvml")
    answers = answers_of_a_node(2, 18) | {
        "nvmlDeviceGetNvLinkRemoteDeviceType": lambda h, link: getattr(pynvml, f"NVML_NVLINK_DEVICE_TYPE_{remote}"),
        "nvmlDeviceGetP2PStatus": lambda a, b, kind: getattr(pynvml, f"NVML_P2P_STATUS_{peers}"),
    }
    assert FakePynvml(answers).state().topology == (("X", cell), (cell, "X"))


# NCCL


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
def test_nccl_version_comes_from_the_library(tmp_path: Path) -> None:
    source, lib = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int *v) { *v = 22703; return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(lib), str(source)], check=True)
    assert nccl.library_version(lib) == ("2.27.3", "ncclGetVersion")
