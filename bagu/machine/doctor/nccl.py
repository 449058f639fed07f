"""Every libnccl that a process on this machine may load, its version, and the one torch has loaded.

Two versions on the loader's paths are a common fault: ranks that load different versions hang or crash in the first
collective, and LD_LIBRARY_PATH decides which version a rank loads.
"""

import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bagu.machine.device import torch_nccl

NAME = re.compile(r"^(lib)?nccl(\.so(\.\d+)*|\.\d+\.dylib|\d*\.dll)$")
COMMON = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/opt/nccl/lib", "/opt/conda/lib")

# Loading a library runs its constructors, so a separate process loads it.
ASK = """
import ctypes, sys
version = ctypes.c_int()
if ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(version)) == 0:
    print(version.value)
"""


@dataclass(frozen=True, kw_only=True)
class NcclLibrary:
    """One file. `told_by` is the source of `version`: "ncclGetVersion", "its text", "its name", or None."""

    path: str
    version: str | None
    told_by: str | None
    loaded: bool  # mapped into this process, which has imported torch


@dataclass(frozen=True, kw_only=True)
class Nccl:
    """`torch` is the version torch reports; if NCCL is linked into torch, it has no path in `libraries`."""

    torch: str | None
    libraries: tuple[NcclLibrary, ...]


def find_nccl(folders: Iterable[Path] | None = None) -> Nccl:
    """The libraries in `folders`; default: the loader's folders, the wheels on sys.path, and the usual folders."""
    mapped = _mapped()
    files: dict[Path, None] = dict.fromkeys(mapped)
    for folder in search_folders() if folders is None else folders:
        if folder.is_dir():
            files |= dict.fromkeys(p.resolve() for p in sorted(folder.iterdir()) if NAME.match(p.name) and p.is_file())
    return Nccl(
        torch=torch_nccl(), libraries=tuple(_library(path, loaded=path in mapped) for path in sorted(files, key=str))
    )


def search_folders() -> Iterator[Path]:
    for entry in sys.path:
        yield Path(entry, "nvidia", "nccl", "lib")
        yield Path(entry, "torch", "lib")
    for variable in ("LD_LIBRARY_PATH", "LIBRARY_PATH", "DYLD_LIBRARY_PATH"):
        yield from (Path(entry) for entry in os.environ.get(variable, "").split(os.pathsep) if entry)
    for variable in ("NCCL_HOME", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"):
        if home := os.environ.get(variable):
            yield from (Path(home, "lib"), Path(home, "lib64"))
    yield from (Path(folder) for folder in COMMON)
    yield from Path("/usr/lib").glob("*-linux-gnu*")
    yield from Path("/usr/local").glob("cuda*/lib64")
    yield from Path("/usr/local").glob("nccl*/lib")
    yield from _loader_folders()


def version_text(code: int) -> str:
    """NCCL's version number as text: 22809 is 2.28.9; before 2.9 the code of 2.8.4 was 2804."""
    major = 10_000 if code >= 10_000 else 1_000
    return f"{code // major}.{code % major // 100}.{code % 100}"


def library_version(path: Path) -> tuple[str | None, str | None]:
    """(version, told_by): from ncclGetVersion, else the text in the file, else the file name, else (None, None)."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK, str(path)], capture_output=True, text=True, timeout=30, check=False
        )
    except subprocess.TimeoutExpired:  # a constructor may wait for a GPU; read the file instead
        done = None
    if done is not None and done.returncode == 0 and done.stdout.strip().isdigit():
        return version_text(int(done.stdout)), "ncclGetVersion"
    if path.stat().st_size:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if found := re.search(rb"NCCL version (\d+\.\d+\.\d+)", data):
                return found.group(1).decode(), "its text"
    if named := re.search(r"\.so\.(\d+\.\d+\.\d+)$", path.name):
        return named.group(1), "its name"
    return None, None


def _library(path: Path, *, loaded: bool) -> NcclLibrary:
    version, told_by = library_version(path)
    return NcclLibrary(path=str(path), version=version, told_by=told_by, loaded=loaded)


def _mapped() -> set[Path]:
    """The libnccl files in the memory map of this process; empty if the system has no /proc."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return set()
    paths = (line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if line.count("/"))
    return {Path(path).resolve() for path in paths if NAME.match(Path(path).name) and Path(path).exists()}


def _loader_folders() -> Iterator[Path]:
    ldconfig = shutil.which("ldconfig") or shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if ldconfig is None:
        return
    listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, timeout=30, check=False).stdout
    for path in re.findall(r"=> (\S*nccl\S*)", listing):
        yield Path(path).parent
