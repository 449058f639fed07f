"""Diagnose: turn a Report into findings. It does not query the machine, so tests can pass hand-built reports.

A *fault* makes results wrong, slow or impossible and sets the exit status. *advice* is useful to know. *ok* means that
no fault was found. Each finding has one line of title and one line of advice.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bagu.machine.doctor.gpus import GpuState
from bagu.machine.doctor.report import Report

GIB = 1 << 30

THROTTLE_ADVICE: dict[str, tuple[Literal["advice", "fault"], str]] = {
    "power cap": (
        "advice",
        "the GPU runs at its power limit, as it does under full load; `nvidia-smi -pl` sets the limit",
    ),
    "application clocks set": ("advice", "its clocks are fixed; `nvidia-smi -rgc` and `-rac` reset them"),
    "sync boost": ("advice", "its clocks follow a slower GPU of its boost group"),
    "display clocks set": ("advice", "a display limits its clocks"),
    "hardware slowdown": ("fault", "too hot or short of power: check cooling and power supply before any benchmark"),
    "software thermal slowdown": ("fault", "the GPU is too hot: check air flow and fans before any benchmark"),
    "hardware thermal slowdown": ("fault", "the GPU is far too hot: check air flow and fans now"),
    "power brake": ("fault", "the host limits its power: check the power supply of the machine and the rack"),
}


@dataclass(frozen=True)
class Finding:
    level: Literal["ok", "advice", "fault"]
    title: str
    advice: str


def diagnose(report: Report) -> list[Finding]:
    """All findings, faults first. The list is never empty."""
    checks = (_gpu, _driver, _nvml, _gpu_state, _throttle, _nvlink, _nccl, _triton, _host, _measured)
    found = [finding for check in checks for finding in check(report)]
    if not any(finding.level == "fault" for finding in found):
        found.append(Finding("ok", "no fault found", "nothing to do"))
    return sorted(found, key=lambda finding: ("fault", "advice", "ok").index(finding.level))


def _gpu(r: Report) -> Iterator[Finding]:
    if not r.gpu_present:
        yield Finding(
            "advice", "no GPU", "bagu runs on the CPU with the torch backend; Triton kernels need an NVIDIA GPU"
        )
    elif r.environment["cuda"] is None:
        yield Finding("fault", "there is a GPU, but this torch is built without CUDA", "install a CUDA build of torch")
    elif not r.machine.gpus and not _driver_too_old(r):
        hint = "check CUDA_VISIBLE_DEVICES, and start the container with its GPUs (--gpus all)"
        yield Finding("fault", "there is a GPU, but torch cannot use it", hint)
    elif r.machine.gpus and r.nvml and len(r.machine.gpus) < len(r.nvml.gpus):
        title = f"torch sees {len(r.machine.gpus)} of {len(r.nvml.gpus)} GPUs"
        yield Finding("advice", title, "CUDA_VISIBLE_DEVICES hides the others; unset it to use all")


def _driver(r: Report) -> Iterator[Finding]:
    build, speaks = r.environment["cuda"], r.driver_cuda
    if build is None or speaks is None:
        return
    title = f"driver {r.environment['driver'] or ''} supports CUDA {speaks}, torch is built for {build}"
    if _driver_too_old(r):
        yield Finding("fault", title, f"update the driver, or install a torch built for CUDA {speaks} or older")
    elif _numbers(speaks) < _numbers(build):
        yield Finding("advice", title, "this works within one CUDA major version; a newer driver removes the mismatch")


def _driver_too_old(r: Report) -> bool:
    """A CUDA build needs a driver of the same or a later CUDA major version."""
    build, speaks = r.environment["cuda"], r.driver_cuda
    return build is not None and speaks is not None and _numbers(speaks)[0] < _numbers(build)[0]


def _nvml(r: Report) -> Iterator[Finding]:
    if r.gpu_present and r.nvml is None:
        missing = "`pip install nvidia-ml-py` to see clocks, temperature, NVLink and topology"
        silent = "if `nvidia-smi` fails too, reboot (after a driver update), or mount the driver in the container"
        title = f"NVML is not available: {r.nvml_problem}"
        yield Finding("advice", title, silent if r.packages.get("nvidia-ml-py") else missing)


def _gpu_state(r: Report) -> Iterator[Finding]:
    gpus = r.nvml.gpus if r.nvml else ()
    for gpu in gpus:
        if gpu.problems:
            yield Finding(
                "fault", f"GPU {gpu.index} fails: {gpu.problems[0]}", "run `dmesg | grep Xid`, then reset or reboot"
            )
    if bad := [g for g in gpus if g.ecc_uncorrected]:
        title = f"{_names(bad)}: uncorrected memory errors ({_each(bad, lambda g: g.ecc_uncorrected)})"
        yield Finding("fault", title, "results may be wrong: reset the GPU; replace it if the errors return")
    if bad := [g for g in gpus if g.ecc_corrected]:
        title = f"{_names(bad)}: corrected memory errors ({_each(bad, lambda g: g.ecc_corrected)})"
        yield Finding("advice", title, "no data was lost; watch the count")
    if bad := [g for g in gpus if g.remap_failed]:
        yield Finding("fault", f"{_names(bad)}: no spare memory rows left", "replace the GPU")
    if bad := [g for g in gpus if g.remap_pending]:
        yield Finding("advice", f"{_names(bad)}: memory rows wait to be remapped", "reset the GPU when it is idle")
    if bad := [g for g in gpus if (g.pcie_width or 0) < (g.pcie_max_width or 0)]:
        title = f"{_names(bad)}: PCIe uses {_each(bad, lambda g: g.pcie_width)} of {bad[0].pcie_max_width} lanes"
        yield Finding("advice", title, "host-device copies are slower: check slot, riser and BIOS")
    if bad := [g for g in gpus if g.memory_bytes and g.memory_free_bytes is not None and _little(g)]:
        title = f"{_names(bad)}: {_each(bad, lambda g: f'{(g.memory_free_bytes or 0) / GIB:.1f}')} GiB of memory free"
        yield Finding("advice", title, "another process uses the rest; find it with `nvidia-smi`")


def _throttle(r: Report) -> Iterator[Finding]:
    gpus = r.nvml.gpus if r.nvml else ()
    reasons = dict.fromkeys(reason for gpu in gpus for reason in gpu.throttle or () if reason != "idle")
    for reason in reasons:
        level, advice = THROTTLE_ADVICE.get(reason, ("advice", "see `nvidia-smi -q -d PERFORMANCE`"))
        slow = [gpu for gpu in gpus if reason in (gpu.throttle or ())]
        yield Finding(level, f"{_names(slow)} throttled: {reason}", advice)


def _nvlink(r: Report) -> Iterator[Finding]:
    if r.nvml is None:
        return
    gpus, cells = r.nvml.gpus, r.nvml.topology
    pairs = [(i, j) for i in range(len(gpus)) for j in range(i)]
    bare = [(j, i) for i, j in pairs if not (cells[i][j] or "").startswith("NV")]
    down = [gpu for gpu in gpus if gpu.nvlinks and not all(link.active for link in gpu.nvlinks)]
    if bare:
        some = ", ".join(f"{i}-{j}" for i, j in sorted(bare)[:4]) + (", …" if len(bare) > 4 else "")
        title = f"no NVLink between {len(bare)} of {len(pairs)} GPU pairs ({some})"
        if any(gpu.nvlinks for gpu in gpus):
            hint = (
                "check bridges, the fabric manager (`systemctl status nvidia-fabricmanager`) and `nvidia-smi nvlink -s`"
            )
            yield Finding("fault", title, hint)
        else:
            yield Finding("advice", title, "these GPUs use PCIe: prefer data or pipeline to tensor parallelism")
    elif len(gpus) > 1 and down:
        yield Finding(
            "fault", f"{_names(down)}: some NVLinks are down", "run `nvidia-smi nvlink -s` and -e; reseat or reset"
        )


def _nccl(r: Report) -> Iterator[Finding]:
    versions = {lib.version for lib in r.nccl.libraries if lib.version}
    versions |= {r.nccl.torch} if r.nccl.torch else set()
    if len(versions) > 1:
        loads = f"torch loads {r.nccl.torch}" if r.nccl.torch else "torch has none"
        yield Finding(  # a fault only with several GPUs: one GPU needs no NCCL
            "fault" if len(r.machine.gpus) > 1 else "advice",
            f"{len(versions)} NCCL versions: {', '.join(sorted(versions, key=_numbers))}; {loads}",
            "keep one in LD_LIBRARY_PATH and the environment: ranks with different versions hang",
        )


def _triton(r: Report) -> Iterator[Finding]:
    triton, numpy = r.environment["triton"], r.environment["numpy"]
    linux, gpu = r.environment["os"].startswith("Linux"), bool(r.machine.gpus)
    if triton is None:
        if linux and gpu:
            yield Finding("fault", "Triton is missing", "run `pip install 'bagu[triton]'`; without it ops use PyTorch")
        return
    if gpu and r.c_compiler is None:
        yield Finding("fault", "Triton has no C compiler", "install gcc or set CC: Triton compiles launchers with it")
    if gpu and r.triton_interprets:
        yield Finding("advice", "TRITON_INTERPRET is set", "unset it: kernels run in Python, thousands of times slower")
    # Loops with a runtime bound fail: triton-lang/triton issue 9171, fixed in 3.7.
    if _numbers(triton)[:2] == (3, 6) and numpy and _numbers(numpy) >= (2, 4):
        yield Finding(
            "fault" if r.triton_interprets else "advice",
            f"Triton {triton}'s interpreter does not work with NumPy {numpy}",
            "to test on the CPU, `pip install 'numpy<2.4'`; compiled kernels are not affected",
        )


def _host(r: Report) -> Iterator[Finding]:
    free, total = r.memory_available_bytes, r.machine.memory_bytes
    if free is not None and total and free < max(total // 20, GIB):
        title = f"{free / GIB:.1f} of {total / GIB:.1f} GiB of memory free"
        yield Finding("fault" if free < GIB // 2 else "advice", title, "stop other processes to avoid swapping")
    for disk in r.disks:
        if disk.free_bytes < 5 * GIB:
            title = f"{disk.free_bytes / GIB:.1f} GiB free for the {disk.use}, {disk.path}"
            yield Finding("fault" if disk.free_bytes < GIB else "advice", title, "checkpoints and caches need more")
    if r.cxx_compiler is None:
        yield Finding("advice", "no C++ compiler", "torch.compile and fast decoding on the CPU need one")


def _measured(r: Report) -> Iterator[Finding]:
    if r.measure_problem is not None:
        yield Finding(
            "fault", f"the measurement failed: {r.measure_problem}", "free the device, then run `bagu doctor` again"
        )
    names = {f"cuda:{gpu.index}": gpu.name for gpu in r.machine.gpus}
    for what, unit in (("copy", "TB/s"), ("matmul", "TFLOP/s")):
        for one in r.ceilings:
            rate = getattr(one, what)
            best = max(getattr(c, what) for c in r.ceilings if names.get(c.device) == names.get(one.device))
            if rate < 0.9 * best:
                title = f"{one.device}: {what} at {rate / 1e12:.2f} {unit}, the best GPU at {best / 1e12:.2f} {unit}"
                yield Finding("fault", title, "it slows every collective: check temperature, power and other processes")


def _little(gpu: GpuState) -> bool:
    return (gpu.memory_free_bytes or 0) < (gpu.memory_bytes or 0) // 10


def _names(gpus: Sequence[GpuState]) -> str:
    return "GPU " + ", ".join(str(gpu.index) for gpu in gpus)


def _each(gpus: Sequence[GpuState], value: Callable[[GpuState], object]) -> str:
    return ", ".join(str(value(gpu)) for gpu in gpus)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else (0,)
