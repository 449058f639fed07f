"""The ceilings of this machine: the best rates of its memory and its matrix units.

Other modules report speed as a fraction of these ceilings, measured in the same run.
"""

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from bagu.machine.device import c_compiler, default_device, gpu, triton_interprets
from bagu.machine.timing import flush_buffer, measure

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The best rates of `device`. `read`, `write`, `copy`: bytes/s (copy counts bytes read plus bytes written);
    `matmul`: FLOP/s on random data of `dtype`."""

    read: float
    write: float
    copy: float
    matmul: float
    dtype: str
    device: str


def measure_ceilings(
    device: torch.device | str | None = None, *, dtype: torch.dtype | None = None, quick: bool = False
) -> Ceilings:
    """Measure the ceilings of `device` (default: the first GPU, else the CPU).

    Each ceiling is the best median over several implementations and sizes. `quick` uses one size and only torch's own
    kernels (no compilation) and takes less than 2 s. `dtype` is the dtype of the matrix product; the default is bf16 on
    a GPU that has it, else fp16 on a GPU and fp32 on a CPU.
    """
    device = torch.device(device) if device is not None else default_device()
    dtype = dtype or _matmul_dtype(device)
    scrub = flush_buffer(device)
    seconds = 0.06 if quick else 0.12

    def best(candidates: Iterable[tuple[float, Callable[[], object]]]) -> float:
        """The highest work per second among (work, function) pairs."""
        rates = []
        for work, fn in candidates:
            timing = measure(fn, device, warmup=2, min_samples=3, seconds=seconds, buffer=scrub)
            rates.append(work / timing.median_s)
        return max(rates)

    read, write, copy = 0.0, 0.0, 0.0
    for size in _buffer_sizes(device, quick):
        src = torch.empty(size // 4, device=device).uniform_()
        dst = torch.zeros_like(src)
        kernels = not quick and _triton_compiles_for(device)
        read = max(read, best(_reads(src, kernels)))
        write = max(write, best(_writes(dst, kernels)))
        copy = max(copy, best(_copies(dst, src, kernels)))
        del src, dst
    return Ceilings(
        read=read,
        write=write,
        copy=copy,
        matmul=best(_matmuls(device, dtype, quick)),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
    )


Candidates = Iterator[tuple[float, Callable[[], object]]]


def _reads(src: torch.Tensor, kernels: bool) -> Candidates:
    rows = src.view(-1, 4096)
    yield src.nbytes, lambda: torch.sum(src)
    yield src.nbytes, lambda: torch.sum(rows, 1)
    if src.is_cuda:
        yield src.nbytes, lambda: torch.amax(rows, 1)
    if kernels:
        from bagu.machine import ceiling_kernels

        out = torch.empty(src.numel() // ceiling_kernels.BLOCK, device=src.device)
        yield src.nbytes, lambda: ceiling_kernels.read(out, src)


def _writes(dst: torch.Tensor, kernels: bool) -> Candidates:
    yield dst.nbytes, dst.zero_
    yield dst.nbytes, lambda: dst.fill_(1.0)
    if kernels:
        from bagu.machine import ceiling_kernels

        yield dst.nbytes, lambda: ceiling_kernels.write(dst, 1.0)


def _copies(dst: torch.Tensor, src: torch.Tensor, kernels: bool) -> Candidates:
    yield 2 * src.nbytes, lambda: dst.copy_(src)
    yield 2 * src.nbytes, lambda: torch.neg(src, out=dst)  # a vectorized loop, on some machines faster than memcpy
    if kernels:
        from bagu.machine import ceiling_kernels

        yield 2 * src.nbytes, lambda: ceiling_kernels.copy(dst, src)


def _matmuls(device: torch.device, dtype: torch.dtype, quick: bool) -> Candidates:
    sides = (8192,) if device.type == "cuda" else (1024,) if quick else (1024, 2048)
    for side in sides:
        # Random data: on zeros an H200 draws less power, clocks higher and shows 894 instead of 788 TFLOP/s.
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        c = torch.empty_like(a)
        yield 2 * side**3, lambda a=a, b=b, c=c: torch.mm(a, b, out=c)  # type: ignore[misc]


def _buffer_sizes(device: torch.device, quick: bool) -> tuple[int, ...]:
    """Bytes of each of the two buffers: much larger than the caches, at most a 16th of the GPU's memory."""
    if device.type == "cpu":
        return (64 * MIB,) if quick else (64 * MIB, 256 * MIB)
    limit = 1 << (gpu(device).memory_bytes // 16).bit_length() - 1
    return tuple(sorted({min(size, limit) for size in ((1024 * MIB,) if quick else (1024 * MIB, 4096 * MIB))}))


def _matmul_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if gpu(device).capability >= (8, 0) else torch.float16


def _triton_compiles_for(device: torch.device) -> bool:
    """Whether Triton can compile a kernel for `device`: a GPU, a C compiler, and not the interpreter."""
    present = importlib.util.find_spec("triton") is not None
    return device.type == "cuda" and present and not triton_interprets() and c_compiler() is not None
