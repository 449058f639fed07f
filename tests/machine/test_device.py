"""Machine facts, and the record files that store them."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from bagu import __version__
from bagu.errors import ArgumentError, BaguError
from bagu.machine import device, environment
from bagu.machine.device import Gpu, default_device, named_device
from bagu.runs import record


def gpu(index: int, name: str = "NVIDIA H200") -> Gpu:
    return Gpu(
        index=index, name=name, capability=(9, 0), memory_bytes=141 * 10**9, multiprocessors=132, l2_bytes=60 << 20
    )


# --- device -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpu", "gpus", "name"),
    [
        ("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz", (), "cpu-4core-intel-xeon-platinum-8480c-cpu"),
        ("Apple M3 Max", (), "cpu-4core-apple-m3-max"),
        ("?", (), "cpu-4core-unknown"),
        ("any", (gpu(0),), "nvidia-h200"),
        ("any", (gpu(0), gpu(1)), "nvidia-h200-x2"),
        ("any", (gpu(0), gpu(1, "Tesla T4")), "nvidia-h200-tesla-t4"),
    ],
)
def test_name_is_a_slug(cpu: str, gpus: tuple[Gpu, ...], name: str) -> None:
    assert device._name(cpu, 4, gpus) == name


def test_this_machine_is_plausible() -> None:
    machine = device.this_machine()
    assert re.fullmatch(r"[a-z0-9-]+", machine.name)
    assert machine.cores >= 1
    assert machine.cpu
    assert len(machine.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    free = device.available_memory()
    assert free is None or machine.memory_bytes is None or 0 < free <= machine.memory_bytes


def test_machine_facts_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS and Windows, where /proc and /sys do not exist."""
    monkeypatch.setattr(device, "_read", lambda path: None)
    machine = device.this_machine()
    assert machine.cpu
    assert machine.cache_bytes is None
    assert re.fullmatch(r"[a-z0-9-]+", machine.name)


CPUINFO = "Features: fp asimd\nCPU implementer\t: {implementer}\nCPU variant\t: 0x3\nCPU part\t: {part}\n\n"


@pytest.mark.parametrize(
    ("cores", "name"),
    [
        ([("0x41", "0xd0c")] * 2, "Neoverse-N1"),
        ([("0x41", "0xd05"), ("0x41", "0xd0b")], "Cortex-A55 + Cortex-A76"),
        ([("0x41", "0xfff")], "Arm 0x41:0xfff"),
    ],
)
def test_an_arm_cpu_is_named_by_its_part_numbers(
    monkeypatch: pytest.MonkeyPatch, cores: list[tuple[str, str]], name: str
) -> None:
    """Arm's /proc/cpuinfo has no model name: "aarch64" would put every Arm machine into one file of records."""
    text = "".join(CPUINFO.format(implementer=i, part=p) for i, p in cores)
    monkeypatch.setattr(device, "_read", {"/proc/cpuinfo": text}.get)
    monkeypatch.setattr(device, "_output", lambda *_: None)
    assert device.cpu_model() == name
    assert device.this_machine().name.endswith(re.sub(r"[^a-z0-9]+", "-", name.lower()))
    assert device.cpu_features() == "asimd fp"


def test_an_unknown_arm_part_is_named_by_lscpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_read", {"/proc/cpuinfo": CPUINFO.format(implementer="0x41", part="0xfff")}.get)
    monkeypatch.setattr(device, "_output", lambda *_: "Vendor ID: ARM\nModel name:          Neoverse-X9\n")
    assert device.cpu_model() == "Neoverse-X9"


def test_container_limit_bounds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/sys/fs/cgroup/memory.max": f"{3 << 20}\n",
        "/sys/fs/cgroup/memory.current": f"{1 << 20}\n",
        "/proc/meminfo": "MemAvailable:   99999999 kB\n",
    }
    monkeypatch.setattr(device, "_read", files.get)
    assert device.this_machine().memory_bytes == 3 << 20
    assert device.available_memory() == 2 << 20


def test_driver_version_is_read_from_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12.2.0\n"
    monkeypatch.setattr(device, "_read", lambda path: text)
    assert device.driver_version() == "580.159.04"


def test_compiler_follows_cc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "mycc"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("CC", f"{program} -m64")
    assert device.c_compiler() == str(program)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert device.c_compiler() is None


# --- record -----------------------------------------------------------------------------------------------------------


def test_environment_is_json_and_complete() -> None:
    facts = json.loads(json.dumps(environment.environment()))
    assert facts["bagu"] == __version__
    assert facts["torch"] == torch.__version__
    assert facts["machine"] == device.this_machine().name
    assert facts["time"].endswith("+00:00")
    assert {"commit", "python", "triton", "numpy", "cuda", "driver", "os"} <= facts.keys()


def test_rows_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "rows.jsonl"
    record.append_rows(path, [{"a": 1}, {"b": "八股\u2028\n"}])
    record.append_rows(path, [])
    record.append_rows(path, iter([{"c": None}]))
    assert record.read_rows(path) == [{"a": 1}, {"b": "八股\u2028\n"}, {"c": None}]


def _append_many(path: Path, who: int) -> None:
    for _ in range(100):
        record.append_rows(path, [{"who": who, "pad": "x" * 500}] * 2)


def test_concurrent_appends_do_not_mix_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    writers = [context.Process(target=_append_many, args=(path, who)) for who in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    rows = record.read_rows(path)
    assert [sum(row["who"] == who for row in rows) for who in range(3)] == [200, 200, 200]


@pytest.mark.parametrize("line", ['{"a": 1', "[1, 2]"])
def test_broken_line_names_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n' + line + "\n")
    with pytest.raises(BaguError, match=r"rows\.jsonl:3: "):
        record.read_rows(path)


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BaguError, match="does not exist"):
        record.read_rows(tmp_path / "none.jsonl")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), {1, 2}, torch.ones(1)])
def test_a_row_that_is_not_json_writes_nothing(tmp_path: Path, bad: object) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(BaguError, match="row 1 for"):
        record.append_rows(path, [{"a": 1}, {"a": bad}])
    assert not path.exists()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_follows_the_packages_files(tmp_path: Path) -> None:
    def git(*args: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *identity, *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package, installed = tmp_path / "pkg", tmp_path / "env" / "pkg"
    for folder in (package, installed):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    (tmp_path / ".gitignore").write_text("env/\n")
    assert environment._commit(package) is None
    git("init", "-q")
    assert environment._commit(package) is None  # no commit yet
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD")
    assert environment._commit(package) == head
    (tmp_path / "results.jsonl").write_text("{}")
    assert environment._commit(package) == head
    (package / "new.py").write_text("")
    assert environment._commit(package) == f"{head}-dirty"
    assert environment._commit(installed) is None  # an environment inside another checkout


def test_unknown_devices_are_named() -> None:
    assert named_device(None) == default_device() and named_device("cpu") == torch.device("cpu")
    for name, says in (("tpu", "unknown device 'tpu'"), ("cuda:99", "torch finds"), ("meta", "cpu or cuda")):
        with pytest.raises(ArgumentError, match=says):
            named_device(name)
