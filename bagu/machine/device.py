"""Facts about this machine: CPU, memory, caches, GPUs, driver, compilers.

The only module that queries `torch.cuda` for facts. It measures nothing (`timing` does). A fact that the system does
not provide is None. Linux provides most facts in /proc and /sys, macOS through `sysctl`, Windows through its API; each
query falls back in that order.
"""

import ctypes
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from bagu.errors import ArgumentError, UnknownName
from bagu.machine.cores import available_cores


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as torch sees it. `index` is torch's index, after CUDA_VISIBLE_DEVICES."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
    l2_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`name` can be used as a file name: "nvidia-h200", "nvidia-h200-x8", "cpu-2core-intel-xeon-processor".

    `cores` counts the cores this process may use. `memory_bytes` is the limit of the container. `cache_bytes` is the
    size of the last-level cache.
    """

    name: str
    cpu: str
    cores: int
    memory_bytes: int | None
    cache_bytes: int | None
    gpus: tuple[Gpu, ...]


def this_machine() -> Machine:
    cpu, cores, gpus = cpu_model(), available_cores(), _gpus()
    return Machine(
        name=_name(cpu, cores, gpus),
        cpu=cpu,
        cores=cores,
        memory_bytes=_total_memory(),
        cache_bytes=_last_level_cache(),
        gpus=gpus,
    )


def default_device() -> torch.device:
    """The first CUDA device if torch can use one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def named_device(name: str | None) -> torch.device:
    """The device named by a flag or a config; None is `default_device`."""
    if name is None:
        return default_device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ArgumentError(f"unknown device {name!r}", hint="use cpu, cuda or cuda:1") from error
    if device.type == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (index := device.index or 0) >= found:
            raise ArgumentError(f"device {name!r}: torch finds {found} GPUs", hint="run bagu doctor")
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise ArgumentError(f"device {name!r} is not supported; bagu runs on cpu or cuda", hint="use cpu")
    return device


def named_dtype(name: str) -> torch.dtype:
    """The dtype named by a flag or a config."""
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    UnknownName.check("dtype", name, dtypes)
    return dtypes[name]


@functools.cache
def onednn_has_bf16() -> bool:
    """Whether oneDNN has a bf16 matmul on this CPU: x86 with AVX-512, ARM with BF16 instructions. On other CPUs torch
    falls back to a naive loop, 100 times slower than fp32, and packing a bf16 weight raises."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_bf16_instructions() -> bool:
    """Whether the CPU multiplies bf16 itself: AMX, AVX512_BF16, or ARM's BF16; older ones of both families do not.
    oneDNN has a bf16 matmul on any AVX-512 too, in fp32, where the bits of a row depend on its place in a block (a
    Cascade Lake Xeon, three threads)."""
    if platform.machine() in ("x86_64", "AMD64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return onednn_has_bf16()


# Dense bf16 FLOP/s from the vendor's data sheets. By convention MFU is a fraction of these, not of a measured ceiling.
VENDOR_FLOPS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


def vendor_flops(device: torch.device) -> float | None:
    """The data-sheet dense bf16 FLOP/s of a GPU in the table; None for any other device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for part, flops in VENDOR_FLOPS.items() if part in name), None)


# --- GPU --------------------------------------------------------------------------------------------------------------


def gpu(device: torch.device | int) -> Gpu:
    """The properties of one CUDA device."""
    index = device if isinstance(device, int) else device.index
    index = torch.cuda.current_device() if index is None else index
    p = torch.cuda.get_device_properties(index)
    return Gpu(
        index=index,
        name=p.name,
        capability=(p.major, p.minor),
        memory_bytes=p.total_memory,
        multiprocessors=p.multi_processor_count,
        l2_bytes=p.L2_cache_size,
    )


def _gpus() -> tuple[Gpu, ...]:
    return tuple(gpu(index) for index in range(torch.cuda.device_count())) if torch.cuda.is_available() else ()


def cuda_build() -> str | None:
    """The CUDA version torch was built with, e.g. "13.0"; None for a CPU build."""
    return torch.version.cuda


def torch_nccl() -> str | None:
    """The NCCL version torch uses, e.g. "2.28.9"; None if torch is built without NCCL."""
    if not hasattr(torch._C, "_nccl_version"):  # torch.cuda.nccl.version() calls it
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def driver_version() -> str | None:
    """The version of the NVIDIA driver, e.g. "580.159.04"."""
    text = _read("/proc/driver/nvidia/version")
    if text and (found := re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)):
        return found.group(1)
    out = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return out.splitlines()[0].strip() if out else None


def driver_cuda() -> str | None:
    """The newest CUDA version the driver supports, e.g. "13.0"; None without a driver. Needs no NVML and no context."""
    try:
        libcuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if libcuda.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def gpu_in_system() -> bool:
    """Whether the machine has an NVIDIA GPU, even if torch cannot use it."""
    if torch.cuda.is_available():
        return True
    nodes = (*Path("/dev").glob("nvidia[0-9]*"), *Path("/proc/driver/nvidia").glob("gpus/*"))
    return bool(nodes) or "GPU" in (_output("nvidia-smi", "-L") or "")


# --- CPU --------------------------------------------------------------------------------------------------------------


def c_compiler() -> str | None:
    """The C compiler that Triton uses to build its launchers: $CC, then gcc, then clang."""
    return _first_program(os.environ.get("CC"), "gcc", "clang", "cl")


def cxx_compiler() -> str | None:
    """The C++ compiler that torch.compile uses for CPU code: $CXX, then the usual names."""
    return _first_program(os.environ.get("CXX"), "g++", "c++", "clang++", "cl")


def triton_interprets() -> bool:
    """Whether TRITON_INTERPRET makes Triton run kernels in its Python interpreter. Triton accepts the same values."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


def available_memory() -> int | None:
    """Bytes of main memory that a new program can use without swapping."""
    if free := re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo") or ""):
        host = int(free.group(1)) * 1024
        limit, used = _cgroup_limit(), _read("/sys/fs/cgroup/memory.current")
        return min(host, limit - int(used)) if limit and used else host
    if sys.platform == "win32":
        return _windows_memory().ullAvailPhys
    return None


def _total_memory() -> int | None:
    if sys.platform == "win32":
        return _windows_memory().ullTotalPhys
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        out = _output("sysctl", "-n", "hw.memsize")
        return int(out) if out else None
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, _cgroup_limit() or total)


def _cgroup_limit() -> int | None:
    text = (_read("/sys/fs/cgroup/memory.max") or "").strip()
    return int(text) if text.isdigit() else None


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API."""

    _fields_ = (
        ("dwLength", ctypes.c_ulong),
        ("dwMemoryLoad", ctypes.c_ulong),
        ("ullTotalPhys", ctypes.c_ulonglong),
        ("ullAvailPhys", ctypes.c_ulonglong),
        ("others", ctypes.c_ulonglong * 5),
    )


def _windows_memory() -> _MemoryStatus:
    status = _MemoryStatus(dwLength=ctypes.sizeof(_MemoryStatus))
    if sys.platform == "win32":
        ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return status


# (implementer, part) in /proc/cpuinfo, which has no model name on Arm. The names are the ones lscpu prints.
ARM_PARTS = {
    (0x41, 0xD03): "Cortex-A53", (0x41, 0xD05): "Cortex-A55", (0x41, 0xD07): "Cortex-A57", (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76", (0x41, 0xD0C): "Neoverse-N1", (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD49): "Neoverse-N2", (0x41, 0xD4F): "Neoverse-V2", (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD8E): "Neoverse-N3", (0xC0, 0xAC3): "Ampere-1", (0xC0, 0xAC4): "Ampere-1a",
}  # fmt: skip


def cpu_model() -> str:
    """The CPU's name, e.g. "Intel(R) Xeon(R) Processor @ 2.10GHz", "Neoverse-N1", "Apple M3"."""
    info = _read("/proc/cpuinfo") or ""
    if found := re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE | re.IGNORECASE):
        return found.group(1).strip()
    if named := _arm_cores(info):
        return named
    if sys.platform == "darwin" and (brand := _output("sysctl", "-n", "machdep.cpu.brand_string")):
        return brand.strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def cpu_features() -> str:
    """The instruction sets that the kernel lists for the first core, sorted; empty if the system has no such list."""
    listed = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read("/proc/cpuinfo") or "", re.MULTILINE)
    return " ".join(sorted(listed.group(1).split())) if listed else ""


def _arm_cores(info: str) -> str | None:
    """The kinds of Arm cores in /proc/cpuinfo, e.g. "Neoverse-N1" or "Cortex-A55 + Cortex-A76"; None if not Arm."""
    numbers = re.findall(r"^CPU implementer\s*:\s*(\w+)$.*?^CPU part\s*:\s*(\w+)$", info, re.MULTILINE | re.DOTALL)
    kinds = sorted({(int(implementer, 0), int(part, 0)) for implementer, part in numbers})
    if not kinds:
        return None
    if all(kind in ARM_PARTS for kind in kinds):
        return " + ".join(ARM_PARTS[kind] for kind in kinds)
    if found := re.findall(r"^Model name:\s*([^-\s].*)$", _output("lscpu") or "", re.MULTILINE):
        return " + ".join(dict.fromkeys(name.strip() for name in found))
    return "Arm " + " + ".join(f"{implementer:#x}:{part:#x}" for implementer, part in kinds)


def _last_level_cache() -> int | None:
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        if found := re.match(r"(\d+)([KMG]?)", _read(str(path)) or ""):
            sizes.append(int(found.group(1)) << {"": 0, "K": 10, "M": 20, "G": 30}[found.group(2)])
    if not sizes and sys.platform == "darwin":  # Apple's own chips have no L3 entry
        sizes = [int(out) for key in ("hw.l3cachesize", "hw.l2cachesize") if (out := _output("sysctl", "-n", key))]
    return max(sizes, default=None)


# --- helpers ----------------------------------------------------------------------------------------------------------


def _name(cpu: str, cores: int, gpus: tuple[Gpu, ...]) -> str:
    if not gpus:
        return f"cpu-{cores}core-{_slug(cpu)}"
    kinds = Counter(_slug(gpu.name) for gpu in gpus)
    return "-".join(name if count == 1 else f"{name}-x{count}" for name, count in kinds.items())


def _slug(text: str) -> str:
    text = re.sub(r"\((r|tm|c)\)|@.*$", " ", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-") or "unknown"


def _read(path: str) -> str | None:
    """The text of a system file; None if it does not exist."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return None


def _output(program: str, *args: str) -> str | None:
    """The output of a system program; None if the program is missing or fails."""
    found = shutil.which(program)
    if found is None:
        return None
    try:
        done = subprocess.run([found, *args], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:  # nvidia-smi hangs on a lost GPU
        return None
    return done.stdout if done.returncode == 0 else None


def _first_program(*names: str | None) -> str | None:
    return next((path for name in names if name and (path := shutil.which(name.split()[0]))), None)
