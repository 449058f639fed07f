"""C++ files of the package, compiled to shared libraries on first use.

    bagu.machine.native.library("serve/cpu/step.cpp")   ->   a ctypes library, or None

The package has no build step and no binary. The compiler of the machine ($CXX, c++, g++ or clang++) generates code for
its own CPU in a few seconds. The result is cached under a hash of the source, the included headers, the flags, the
compiler's version and the CPU; processes that start together compile it once. If compiling or loading fails, `library`
warns once with the reason and returns None, and the caller uses PyTorch. BAGU_NATIVE=0 disables the C++.

The library uses torch's OpenMP: it is linked without one, and its calls resolve to the libgomp that torch has loaded. A
second libgomp would start a second pool of spinning threads.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch  # noqa: F401  loads OpenMP, which the libraries call

from bagu.machine.cache import cache_folder
from bagu.machine.device import cxx_compiler

PACKAGE = Path(__file__).parent.parent
COMPILE = ("-std=gnu++17", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC")
LINK = ("-shared", *(("-undefined", "dynamic_lookup") if platform.system() == "Darwin" else ()))
TIMEOUT_S = 300
INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


def wanted() -> bool:
    return os.environ.get("BAGU_NATIVE", "1") not in ("", "0")


@functools.cache
def library(source: str) -> ctypes.CDLL | None:
    """Load the library of a C++ file (a path in the package) from the cache, or compile it now. If that fails, warn
    once and return None."""
    if not wanted():
        return None
    try:
        built = _built(PACKAGE / source)
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or "").strip().splitlines()
        why = next((line for line in lines if "error" in line), lines[0] if lines else str(error))
        _warn(source, "compiled", why)
        return None
    try:
        _export_openmp()
        return ctypes.CDLL(str(built))
    except OSError as error:
        _warn(source, "loaded", str(error))
        return None


def _warn(source: str, step: str, why: str) -> None:
    warnings.warn(f"{source} could not be {step} ({why}); using PyTorch instead", RuntimeWarning, stacklevel=3)


def _export_openmp() -> None:
    """Make the symbols of torch's libgomp visible to libraries loaded later.

    torch for x86 loads libgomp with RTLD_GLOBAL, torch for ARM does not. RTLD_NOLOAD changes the flags of a library
    that is already in the process and never loads a second copy. It raises if torch's OpenMP has another name; loading
    our library then reports the missing symbols.
    """
    if hasattr(os, "RTLD_NOLOAD"):
        with contextlib.suppress(OSError):
            ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_GLOBAL | os.RTLD_LAZY)


def _built(source: Path) -> Path:
    """The path of the compiled library; compiles it if it is not in the cache."""
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    # The package's path is no fact: the contents of its headers are, and so all checkouts share a library.
    facts = [*map(Path.read_bytes, _sources(source)), repr((COMPILE, LINK, version.stdout, _cpu())).encode()]
    digest = hashlib.sha256(b"\0".join(facts)).hexdigest()[:24]
    folder = cache_folder() / "native"
    made = folder / f"{source.stem}-{digest}.so"
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(made.with_suffix(".lock")):
        if not made.exists():
            _compile(compiler, source, made)
    return made


def _compile(compiler: str, source: Path, made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as place:
        unit, library = Path(place) / "unit.o", Path(place) / "library.so"
        for command in (
            [compiler, *COMPILE, f"-I{PACKAGE}", "-c", str(source), "-o", str(unit)],
            [compiler, *LINK, str(unit), "-o", str(library)],
        ):
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
        library.replace(made)  # without locks another process may have finished first; its file is identical


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file, and delete it afterwards. No lock where the system or the file system has none (Windows,
    some network file systems): two processes may then compile the same file at once, which is only slower."""
    with path.open("w") as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # a process that waits for it finds the library


def _compiler() -> str:
    named, found = os.environ.get("CXX"), cxx_compiler()
    if named and shutil.which(named.split()[0]) is None:  # do not replace an explicit choice
        raise FileNotFoundError(f"CXX is {named}, which does not exist")
    if found is None:
        raise FileNotFoundError("no C++ compiler found")
    return found


def _sources(source: Path) -> Iterator[Path]:
    """The file and the headers of the package that it includes."""
    yield source
    for name in INCLUDE.findall(source.read_text()):
        yield from _sources(PACKAGE / name)


def _cpu() -> str:
    """The facts that -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(facts)])


def status(source: str) -> str:
    """The state of a C++ file on this machine: loaded, disabled, or the reason why PyTorch replaces it."""
    if not wanted():
        return "off: BAGU_NATIVE=0"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        loaded = library(source) is not None
    return "built and loaded" if loaded else "; ".join(str(w.message) for w in caught) or f"{source} cannot be loaded"
