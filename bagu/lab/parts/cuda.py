"""CUDA C without nvcc: compiled by the NVRTC that a CUDA build of torch brings, launched on torch's stream.

    kernels = Kernels(SOURCE, expects=("LDS",))      compiled for this GPU, kept in the cache by the hash of the source
    kernels("banks", 1, 256, out, cycles, 32, 1000)  tensors by address, int, float; ctypes values as they are

The compiler removes what a micro-benchmark does not use, so `expects` names instructions
that must be in the machine code.
"""

import ctypes
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bagu.errors import BaguError
from bagu.lab.core import Row, Verdict, numbers_in
from bagu.machine.cache import cache_folder

STEADY = 0.02  # the share by which clocks may move during a measurement


@cache
def nvrtc() -> ctypes.CDLL:
    """The compiler: of the packages beside torch, else of the system."""
    site = Path(torch.__file__).parents[1]
    found = [*site.glob("nvidia/*/lib/libnvrtc.so.*"), *site.glob("torch/lib/libnvrtc*.so*")]
    found += Path("/usr/local").glob("cuda*/lib64/libnvrtc.so.*")
    for path in [str(p) for p in found if ".alt." not in p.name and "builtins" not in p.name] + ["libnvrtc.so"]:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise BaguError("there is no NVRTC on this machine", hint="install a CUDA build of torch")


def compiled(source: str, arch: str) -> bytes:
    """The machine code (cubin) of CUDA C for `arch`, such as sm_90a."""
    rtc, program = nvrtc(), ctypes.c_void_p()
    key = hashlib.sha256(f"{arch}\n{source}".encode()).hexdigest()[:24]
    file = cache_folder() / "cuda" / f"{key}.cubin"
    if file.exists():
        return file.read_bytes()
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={arch}".encode())
    _checked(
        "nvrtcCreateProgram", rtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"lab.cu", 0, None, None)
    )
    status, size = rtc.nvrtcCompileProgram(program, 1, options), ctypes.c_size_t()
    if status:
        rtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        rtc.nvrtcGetProgramLog(program, log)
        raise BaguError(f"NVRTC refuses a kernel for {arch}: {log.value.decode()}")
    _checked("nvrtcGetCUBINSize", rtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    code = ctypes.create_string_buffer(size.value)
    _checked("nvrtcGetCUBIN", rtc.nvrtcGetCUBIN(program, code))
    rtc.nvrtcDestroyProgram(ctypes.byref(program))
    file.parent.mkdir(parents=True, exist_ok=True)
    own = file.with_suffix(f".{os.getpid()}")
    own.write_bytes(code.raw)
    own.replace(file)
    return code.raw


def check_code(cubin: bytes, expects: Iterable[str]) -> None:
    """Raise if an instruction that the measurement is about is not in the machine code."""
    from bagu.ops.inspect.offline import disassemble

    text = disassemble(cubin)
    missing = [name for name in expects if name not in text]
    if missing:
        raise BaguError(f"the compiler removed {', '.join(missing)}: the kernel would measure something else")


class Kernels:
    """The kernels of a source on the current GPU."""

    def __init__(self, source: str, *, expects: Sequence[str]) -> None:
        torch.cuda.current_stream()  # makes torch's context the current one
        torch.zeros(1, device="cuda")
        major, minor = torch.cuda.get_device_capability()
        cubin = compiled(source, f"sm_{major}{minor}" + ("a" if major >= 9 else ""))
        check_code(cubin, expects)
        self.driver, self.module = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        _checked("cuModuleLoadData", self.driver.cuModuleLoadData(ctypes.byref(self.module), cubin))
        self.functions: dict[str, ctypes.c_void_p] = {}

    def __call__(self, name: str, grid: int | tuple[int, int], block: int | tuple[int, int], *args: Any) -> None:
        """Launch a kernel on torch's current stream."""
        if name not in self.functions:
            function = ctypes.c_void_p()
            status = self.driver.cuModuleGetFunction(ctypes.byref(function), self.module, name.encode())
            _checked(f"cuModuleGetFunction({name})", status)
            self.functions[name] = function
        values = [_argument(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values))
        (gx, gy), (bx, by) = (pair if isinstance(pair, tuple) else (pair, 1) for pair in (grid, block))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _checked(
            name, self.driver.cuLaunchKernel(self.functions[name], gx, gy, 1, bx, by, 1, 0, stream, pointers, None)
        )


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, int):
        return ctypes.c_int(value)
    return ctypes.c_float(value) if isinstance(value, float) else value


def _checked(what: str, status: int) -> None:
    if status:
        raise BaguError(f"{what} failed with status {status}")


def clock_mhz() -> float | None:
    """The clock of the multiprocessors now; None where NVML does not say."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, found = ctypes.c_void_p(), ctypes.c_uint()
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
    by_uuid = not nvml.nvmlInit_v2() and not nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(device))
    if not by_uuid and nvml.nvmlDeviceGetHandleByIndex_v2(torch.cuda.current_device(), ctypes.byref(device)):
        return None
    return None if nvml.nvmlDeviceGetClockInfo(device, 1, ctypes.byref(found)) else float(found.value)


def warm(seconds: float = 0.3) -> None:
    """Raise the clocks of an idle GPU: products for a while."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    while True:
        for _ in range(20):
            a @ a
        end.record()
        end.synchronize()
        if start.elapsed_time(end) > 1e3 * seconds:
            return


def clocked(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows of a GPU with the clocks before and after each."""
    warm()
    before = clock_mhz()
    for row in rows:
        torch.cuda.synchronize()
        after = clock_mhz()
        yield row | {"clock_before_mhz": before, "clock_mhz": after}
        before = after


def steady(found: Verdict, rows: Sequence[Row]) -> Verdict:
    """The verdict, left open if the clocks of a GPU moved by more than STEADY."""
    seen = numbers_in(rows, "clock_mhz")
    if len(seen) < 2 or max(seen) <= (1 + STEADY) * min(seen):
        return found
    return found.undecided(
        f"steady clocks: they were {min(seen):.0f} to {max(seen):.0f} MHz.",
        f"稳定的时钟：测量期间在 {min(seen):.0f} 到 {max(seen):.0f} MHz 之间变动。",
    )


def multiprocessors() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)
