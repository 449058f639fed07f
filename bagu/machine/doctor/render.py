"""Render: print a Report and its findings as rich tables (eight GPUs fit in 80 columns) or as JSON."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bagu.machine.doctor.diagnose import Finding
from bagu.machine.doctor.gpus import GpuState, NvmlState
from bagu.machine.doctor.report import Report
from bagu.machine.terminal import counted

GIB = 1 << 30
ABSENT = "n/a"
LEGEND = "NV# NVLinks; PCIe: PIX one bridge, PXB more, PHB host bridge; NODE, SYS by NUMA"
STYLES = {"fault": "bold red", "advice": "yellow", "ok": "green"}


def to_json(report: Report, findings: Sequence[Finding]) -> str:
    """Report and findings as one JSON object: {"report": …, "findings": […]}. Sizes are in bytes, rates per s."""
    value = {"report": dataclasses.asdict(report), "findings": [dataclasses.asdict(finding) for finding in findings]}
    return json.dumps(value, indent=2, ensure_ascii=False)


def render(report: Report, findings: Sequence[Finding], console: Console) -> None:
    console.print(_facts("Machine", _machine(report)))
    console.print(_facts("Software", _software(report)))
    if report.nvml is not None and report.nvml.gpus:
        console.print(_gpu_table(report.nvml.gpus))
        console.print(_state_table(report.nvml.gpus))
        console.print(_nvlink_table(report.nvml.gpus))
        console.print(_topology_table(report.nvml))
        console.print(f" {LEGEND}\n", style="dim", highlight=False)
    elif report.machine.gpus:
        console.print(_torch_gpu_table(report))
    if report.nccl.libraries:
        console.print(_nccl_table(report))
    if report.ceilings:
        console.print(_ceiling_table(report))
    console.print(_finding_table(findings))


def _machine(r: Report) -> Iterable[tuple[str, str]]:
    m = r.machine
    yield "name", m.name
    yield "system", r.environment["os"]
    yield "CPU", f"{m.cpu}, {counted(m.cores, 'core')}, last-level cache {_gib(m.cache_bytes, 'MiB')}"
    yield "memory", f"{_gib(r.memory_available_bytes)} free of {_gib(m.memory_bytes)}"
    for disk in r.disks:
        yield "disk", f"{_gib(disk.free_bytes)} free of {_gib(disk.total_bytes)} ({disk.use})"
    if not r.gpu_present:
        yield "GPU", "none"
    yield "fast dtype", r.fast_dtype


def _software(r: Report) -> Iterable[tuple[str, str]]:
    e = r.environment
    commit, dirty, _ = (e["commit"] or ABSENT).partition("-dirty")
    yield "bagu", f"{e['bagu']}, commit {commit[:12]}{dirty}"
    yield "Python", e["python"]
    yield "torch", f"{e['torch']}, CUDA build {e['cuda'] or 'none'}, NCCL {r.nccl.torch or 'none'}"
    yield "driver", f"{e['driver']}, supports CUDA {r.driver_cuda or ABSENT}" if e["driver"] else "none"
    yield "Triton", f"{e['triton'] or 'not installed'}, {_triton_use(r)}"
    yield "compilers", f"C {r.c_compiler or 'none'}, C++ {r.cxx_compiler or 'none'}"
    yield "C++ decode", r.native
    versions = {"numpy": e["numpy"]} | r.packages
    yield "with", ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    yield "not installed", ", ".join(name for name, version in versions.items() if not version) or "nothing"


def _triton_use(r: Report) -> str:
    if r.environment["triton"] is None:
        return "ops use torch"
    if r.machine.gpus and r.c_compiler and not r.triton_interprets:
        return "compiles for the GPU"
    return "interpreter (TRITON_INTERPRET is set)" if r.triton_interprets else "interpreter only, for tests"


def _gpu_table(gpus: Sequence[GpuState]) -> Table:
    table = _table("GPUs", "#", "name", "bus", "sm", "memory free/all", "PCIe", "ECC fixed/lost")
    for g in gpus:
        capability = f"{g.capability[0]}.{g.capability[1]}" if g.capability else ABSENT
        pcie = f"gen{_known(g.pcie_gen)} x{_known(g.pcie_width)}"
        memory = f"{_gib(g.memory_free_bytes, '')}/{_gib(g.memory_bytes)}"
        ecc = f"{_known(g.ecc_corrected)}/{_known(g.ecc_uncorrected)}"
        bus = _known(g.bus).removeprefix("00000000:")  # PCI domain 0
        table.add_row(str(g.index), _known(g.name), bus, capability, memory, pcie, ecc)
    return table


def _state_table(gpus: Sequence[GpuState]) -> Table:
    table = _table("Clocks and power", "#", "SM MHz now/max", "memory MHz", "°C", "W now/limit", "throttled by")
    for g in gpus:
        throttle = ABSENT if g.throttle is None else ", ".join(g.throttle) or "nothing"
        table.add_row(
            str(g.index),
            f"{_known(g.sm_mhz)}/{_known(g.sm_max_mhz)}",
            f"{_known(g.mem_mhz)}/{_known(g.mem_max_mhz)}",
            _known(g.temperature_c),
            f"{_known(g.power_w, '.0f')}/{_known(g.power_limit_w, '.0f')}",
            throttle,
        )
    return table


def _nvlink_table(gpus: Sequence[GpuState]) -> Table:
    """The links of `nvidia-smi nvlink --status`, with equal links in one row."""
    table = _table("NVLink", "#", "links up", "each way", "version", "to")
    index_of = {gpu.bus: gpu.index for gpu in gpus if gpu.bus}
    for g in gpus:
        up = [link for link in g.nvlinks if link.active]
        if not g.nvlinks:
            table.add_row(str(g.index), "none", "", "", "")
            continue
        speeds = Counter(ABSENT if l.speed_mb_s is None else f"{l.speed_mb_s / 1e3:.2f} GB/s" for l in up)
        ends = Counter(
            f"GPU {index_of[l.remote_bus]}" if l.remote_bus in index_of else l.remote or "hidden" for l in up
        )
        table.add_row(
            str(g.index),
            f"{len(up)} of {len(g.nvlinks)}",
            ", ".join(f"{n} × {speed}" for speed, n in speeds.items()),
            ", ".join(sorted({_known(link.version) for link in up})),
            ", ".join(f"{end} × {n}" for end, n in ends.items()),
        )
    return table


def _topology_table(nvml: NvmlState) -> Table:
    """The matrix of `nvidia-smi topo -m`."""
    table = _table("Topology", "", *(f"GPU{gpu.index}" for gpu in nvml.gpus), "CPU affinity")
    for gpu, row in zip(nvml.gpus, nvml.topology, strict=True):
        table.add_row(f"GPU{gpu.index}", *(_known(cell) for cell in row), _known(gpu.cpu_affinity))
    return table


def _torch_gpu_table(r: Report) -> Table:
    table = _table("GPUs (as torch sees them)", "#", "name", "sm", "memory", "SMs", "L2")
    for g in r.machine.gpus:
        capability = f"{g.capability[0]}.{g.capability[1]}"
        sizes = _gib(g.memory_bytes), str(g.multiprocessors), _gib(g.l2_bytes, "MiB")
        table.add_row(str(g.index), g.name, capability, *sizes)
    return table


def _nccl_table(r: Report) -> Table:
    table = _table("NCCL libraries", "version", "from", "torch", "path")
    for lib in r.nccl.libraries:
        row = _known(lib.version), _known(lib.told_by), "loaded" if lib.loaded else "", lib.path
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    return table


def _ceiling_table(r: Report) -> Table:
    table = _table("Measured", "device", "copy", "read", "write", "matmul", "of")
    for c in r.ceilings:
        table.add_row(
            c.device, *(_rate(x, "B/s") for x in (c.copy, c.read, c.write)), _rate(c.matmul, "FLOP/s"), c.dtype
        )
    return table


def _finding_table(findings: Sequence[Finding]) -> Table:
    table = _table("Findings", "", "what", "do")
    for finding in findings:
        level = Text(finding.level, style=STYLES[finding.level])
        table.add_row(level, Text(finding.title), Text(finding.advice))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column)
    return table


def _facts(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = _table(title, "", "")
    table.show_header = False
    for name, value in rows:
        table.add_row(name, Text(value, overflow="fold"))
    return table


def _known(value: object, spec: str = "") -> str:
    return ABSENT if value is None else format(value, spec)


def _rate(rate: float, unit: str) -> str:
    return f"{rate / 1e12:.2f} T{unit}" if rate >= 1e12 else f"{rate / 1e9:.1f} G{unit}"


def _gib(size: int | None, unit: str = "GiB") -> str:
    """Bytes in GiB (or MiB); an empty `unit` prints the number only."""
    if size is None:
        return ABSENT
    return f"{size / (1 << 20):.0f} MiB" if unit == "MiB" else f"{size / GIB:.1f} {unit}".strip()
