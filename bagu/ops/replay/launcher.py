"""Triton's two ways to launch a kernel: the ordinary entry, and the launcher of an already compiled kernel.

`kernel[grid](*args)` looks up the compiled kernel for the arguments at each call: 21 us on an H200's host. The launcher
of the compiled kernel, `CompiledKernel.run`, takes a grid, a raw stream and the arguments, with pointers as integers:
5 to 8 us. It is not a public interface. Triton 3.6 to 3.9 have the form used here. `direct` returns None for a kernel
whose launcher has another form, and the caller then uses the ordinary entry.
"""

from __future__ import annotations

import contextvars
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

# the parameters of a compiled kernel's launcher that precede the kernel's own
LEADING = (
    "gridX",
    "gridY",
    "gridZ",
    "stream",
    "function",
    "kernel_metadata",
    "launch_metadata",
    "launch_enter_hook",
    "launch_exit_hook",
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch through the ordinary entry: the kernel's function, its arguments by name, and the compiled kernel."""

    fn: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    options: Mapping[str, Any]  # warps, stages
    compiled: Any


class Scratch(NamedTuple):
    """An argument of a repeatable launch: memory that is allocated for it."""

    bytes: int


class Direct(NamedTuple):
    """A repeatable launch: `run(*before, stream, *after, *args)`, with pointers passed as integers."""

    run: Callable[..., None]
    before: tuple[Any, ...]
    after: tuple[Any, ...]  # constants, and `Scratch`


class Launcher(Protocol):
    """Repeats launches on one kind of device."""

    def ready(self) -> bool:
        """Whether launches can be repeated now: no launch hook of Triton is set."""

    def current_device(self) -> int: ...

    def stream(self, device: int) -> int:
        """The raw handle of torch's current stream."""

    def empty(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor on the current device."""

    def filled(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Like `empty`, but fills the memory as torch does in deterministic mode."""

    def direct(self, launch: Launch) -> Direct | None:
        """The direct launch of the same kernel on the same grid; None if Triton's launcher has an unexpected form."""


def cuda_launcher() -> CudaLauncher | None:
    """The launcher of compiled kernels on a machine with CUDA; None if torch or Triton lacks a function it needs."""
    try:
        return CudaLauncher()
    except (ImportError, AttributeError):
        return None


@cache
def available_launcher() -> CudaLauncher | None:
    """The launcher of this machine; None without CUDA, or if Triton interprets kernels."""
    from bagu.machine.device import triton_interprets

    return cuda_launcher() if torch.cuda.is_available() and not triton_interprets() else None


class CudaLauncher:
    """The launcher of compiled kernels. It uses private functions of torch and Triton; all are looked up here."""

    def __init__(self) -> None:
        from triton import __version__, knobs

        self._hooks = knobs.runtime
        self.ready()  # raises AttributeError if Triton has no such hooks
        # Triton 3.6 wraps a C function in a few lines of Python that allocate scratch memory by an allocator of the
        # context; skipping them saves 2 us, and 15 where there is such memory (TMA descriptors)
        self._skips_python = __version__.startswith("3.6.") and torch.version.hip is None
        self.current_device = torch._C._cuda_getDevice
        self.stream = torch._C._cuda_getCurrentRawStream
        # Inductor's generated code uses this; torch.empty_strided takes three times as long to parse its arguments
        self.empty = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]

    def ready(self) -> bool:
        return not (self._hooks.launch_enter_hook.calls or self._hooks.launch_exit_hook.calls)

    def filled(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    def direct(self, launch: Launch) -> Direct | None:
        kernel = launch.compiled
        if not all(hasattr(kernel, name) for name in ("run", "function", "packed_metadata")):
            return None
        launcher: Any = type(kernel.run)
        if not takes_kernel_arguments(launcher) or launch.fn.pre_run_hooks:
            return None
        grid, hooks, of = (*launch.grid, 1, 1)[:3], (None, None, None), kernel.metadata
        if self._skips_python and not of.profile_scratch_size:
            size = of.global_scratch_size * of.num_ctas * grid[0] * grid[1] * grid[2]
            how = (kernel.run.launch_cooperative_grid, kernel.run.launch_pdl, Scratch(size) if size else None, None)
            return Direct(kernel.run.launch, grid, (kernel.function, *how, kernel.packed_metadata, *hooks))
        run = with_scratch_memory(kernel.run) if of.global_scratch_size or of.profile_scratch_size else kernel.run
        return Direct(run, grid, (kernel.function, kernel.packed_metadata, *hooks))


def with_scratch_memory(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the launch of a kernel that needs scratch memory for its TMA descriptors: 128 bytes each per program.

    Triton requests it from the allocator of the current context. This sets an allocator in a copy of the context, so
    that an allocator set by the caller for its own kernels stays set.
    """

    def launch(*args: Any, **options: Any) -> Any:
        return contextvars.copy_context().run(_with_allocator, run, args, options)

    return launch


def _with_allocator(run: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    import triton

    triton.set_allocator(_scratch_memory)
    return run(*args, **options)


def _scratch_memory(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """torch aligns allocations to 512 bytes; its caching allocator keeps them valid for work queued on the stream."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


@cache
def takes_kernel_arguments(launcher: type) -> bool:
    """Whether instances of `launcher` take the LEADING parameters, either all by name or the last four in *args,
    followed by the arguments of the kernel."""
    taken = list(inspect.signature(launcher.__call__).parameters.values())[1:]
    names = tuple(p.name for p in taken[:-1])
    return taken[-1].kind is inspect.Parameter.VAR_POSITIONAL and len(names) >= 5 and names == LEADING[: len(names)]


def bound(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a launch by name, in the order of the kernel's parameters, and its options."""
    parameters = inspect.signature(fn.fn).parameters
    given = dict(zip(parameters, args, strict=False)) | {k: v for k, v in kwargs.items() if k in parameters}
    options = {k: v for k, v in kwargs.items() if k not in parameters}
    return {name: given.get(name, p.default) for name, p in parameters.items()}, options


def is_constant(arg: object) -> bool:
    """Whether a kernel argument is a plain value: not a tensor, a descriptor or a tuple of them."""
    from triton.language import dtype

    return arg is None or isinstance(arg, (bool, int, float, str, dtype))


_recording = threading.RLock()


@contextmanager
def noted_launches(note: Callable[[Launch], None]) -> Iterator[None]:
    """Inside, `note` is called after every launch through the ordinary entry in this thread."""
    with _recording:  # one at a time: the entry is replaced for all threads and must be restored
        entry, thread = _entry(), threading.get_ident()
        run = entry.run

        def noting(fn: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            with _disable_current_modes():  # Triton's own tensor operations are not part of the host code
                compiled = run(fn, *args, grid=grid, warmup=warmup, **kwargs)
            if threading.get_ident() == thread:
                named, options = bound(fn, args, kwargs)
                sizes = grid(named) if callable(grid) else grid
                note(Launch(fn=fn, grid=tuple(sizes), args=named, options=options, compiled=compiled))
            return compiled

        entry.run = noting
        try:
            yield
        finally:
            entry.run = run


def _entry() -> Any:
    """The class that @triton.jit returns; Triton's interpreter has a different one."""
    from bagu.machine.device import triton_interprets

    if triton_interprets():
        from triton.runtime.interpreter import InterpretedFunction

        return InterpretedFunction
    from triton.runtime.jit import JITFunction

    return JITFunction
