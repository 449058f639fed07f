"""Compile the kernels of an op without a GPU: record the launches of a call on meta tensors, and compile each of them.

`launches` runs a backend's forward and backward on tensors without values. `compile_launch` specialises a recorded
launch as a real one (for 1 and multiples of 16) and compiles it for an architecture with the ptxas that comes with
Triton. TRITON_INTERPRET must be off.
"""

from __future__ import annotations

import bisect
import inspect
import itertools
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bagu.errors import ArgumentError, BackendError
from bagu.machine.device import triton_interprets
from bagu.ops.contract.core import Case, OpSpec, Streams

TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.bool: "i1",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One recorded launch: the kernel, its arguments by name, its options (warps, stages) and its grid."""

    step: str  # forward, invariant_forward or backward
    fn: Any
    args: Mapping[str, Any]
    options: Mapping[str, Any]
    grid: Any

    @property
    def name(self) -> str:
        return self.fn.fn.__name__


class MetaStreams(Streams):
    """Inputs with a shape and no values."""

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float64, device="meta")

    uniform = normal

    def integers(self, name: str, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    def choice(self, name: str, usual: Any, *others: Any) -> Any:
        return usual


def launches(
    spec: OpSpec,
    case: Case,
    dtype: torch.dtype,
    backend: str = "triton",
    tuning: Mapping[str, Mapping[str, Any]] | None = None,
    only: str | None = None,
) -> list[Launch]:
    """The launches of a forward, of the one for invariant mode, and of a backward, recorded on meta tensors; or `only`
    those of one step. `tuning` has the tuning options of "forward" and "backward"; the default are the backend's
    own."""
    module, sig, chosen = spec.module(backend), spec.sig, tuning or {}
    args = spec.cast(case, spec.inputs(case, MetaStreams()), dtype)
    args = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    found: list[Launch] = []
    with recorded(found, "forward"):
        outputs = spec.apply(module.forward, args, **chosen.get("forward", {}))
    results = dict(zip((r.name for r in sig.results), outputs, strict=True))
    if only == "forward":
        return found
    if only is None and (invariant := getattr(module, "invariant_forward", None)) is not None:
        with recorded(found, "invariant_forward"), suppress(BackendError):  # refused, as an 8-bit cache is
            spec.apply(invariant, args)
    if spec.grads:
        known = args | results
        given = {f"d{o}": results[o] for o in spec.differentiable} | {s: known[s] for s in spec.saves}
        more = dict(chosen.get("backward", {}))
        if "needs" in inspect.signature(module.backward).parameters:
            more["needs"] = dict.fromkeys(spec.made, True)
        with recorded(found, "backward"):
            spec.apply(module.backward, given | {s.name: args[s.name] for s in sig.scalars}, **more)
    return [launch for launch in found if only in (None, launch.step)]


@contextmanager
def recorded(launches: list[Launch], step: str) -> Iterator[None]:
    """Inside, a kernel launch is appended to `launches` and not executed."""
    if triton_interprets():
        raise BackendError("kernels cannot be compiled with TRITON_INTERPRET set", hint="unset it and start again")
    from triton.runtime.jit import JITFunction

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [p.name for p in self.params]
        bound = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        options = {k: v for k, v in kwargs.items() if k not in names}
        launches.append(Launch(step=step, fn=self, args=bound, options=options, grid=grid))

    run = JITFunction.run
    JITFunction.run = record
    try:
        yield
    finally:
        JITFunction.run = run


def specialization(launch: Launch) -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    """The launch as input of the compiler, specialised as in a real launch (for 1 and multiples of 16).

    Its attributes are those of a real launch too, empty lists included: the key of Triton's cache is made of them, and
    a launch is to find what was compiled here.
    """
    from triton import __version__
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    signature, constants, attrs = {}, {}, {}
    for i, param in enumerate(launch.fn.params):
        value = launch.args.get(param.name, param.default)
        one = type(value) is int and value == 1 and not param.do_not_specialize
        if param.is_constexpr or value is None or one:
            signature[param.name] = "constexpr"
            constants[(i,)] = value
            if not __version__.startswith("3.6."):
                attrs[(i,)] = _divisible(False)
            elif isinstance(value, str):  # Triton 3.6 takes a string for attributes, of which "D" is divisibility
                attrs[(i,)] = _divisible("D" in value)
            continue
        aligned = None  # neither a pointer nor an integer
        if isinstance(value, torch.Tensor):
            kind, aligned = f"*{TYPES[value.dtype]}", value.storage_offset() * value.element_size() % 16 == 0
        elif isinstance(value, bool):
            kind = "u1"
        elif isinstance(value, int):
            kind, aligned = ("i32" if -(2**31) <= value < 2**31 else "i64"), value % 16 == 0
        else:
            kind = "fp32"
        signature[param.name] = kind
        if aligned is not None and not param.do_not_specialize:
            attrs[(i,)] = _divisible(aligned and not param.do_not_specialize_on_alignment)
    key = (launch.fn.fn.__qualname__, repr(signature), repr(constants), repr(attrs), repr(launch.options))
    written = GluonASTSource if launch.fn.is_gluon() else ASTSource
    return written(fn=launch.fn, signature=signature, constexprs=constants, attrs=attrs), dict(launch.options), key


def _divisible(yes: bool) -> list[list[Any]]:
    return [["tt.divisibility", 16]] if yes else []


def compile_launch(launch: Launch, arch: str = "sm_90") -> Any:
    """The compiled kernel of a launch: Triton's CompiledKernel, with `asm` and `metadata`."""
    import triton
    from triton.backends.compiler import GPUTarget

    if not (arch.startswith("sm_") and arch[3:].isdecimal()):
        raise ArgumentError(f"{arch!r} is not an architecture", hint="use sm_80, sm_86, sm_89, sm_90 or sm_100")
    source, options, _ = specialization(launch)
    return triton.compile(source, target=GPUTarget("cuda", int(arch[3:]), 32), options=options)


def disassemble(cubin: bytes) -> str:
    """Resource usage and machine code, from the cuobjdump in the Triton package."""
    return _cuobjdump(cubin, "-res-usage") + _cuobjdump(cubin, "-sass")


def registers(cubin: bytes) -> int:
    """The registers of a thread of a kernel."""
    found = re.search(r"REG:(\d+)", _cuobjdump(cubin, "-res-usage"))
    assert found, "cuobjdump names no registers"
    return int(found[1])


def instructions(cubins: Sequence[bytes], arch: str = "sm_90") -> list[str]:
    """The machine code of each of several kernels, an instruction a line, without labels.

    One process of nvdisasm takes all of them: it needs 0.6 s to start and 0.01 s for a kernel.
    """
    codes = [_code(cubin) for cubin in cubins]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code"
        path.write_bytes(b"".join(codes))
        argv = [str(_tool("nvdisasm")), "--binary", arch.replace("_", "").upper(), str(path)]
        lines = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.splitlines()
    ends = list(itertools.accumulate(map(len, codes)))
    found: list[list[str]] = [[] for _ in codes]
    for line in lines:
        if address := re.match(r"\s*/\*([0-9a-f]+)\*/", line):
            found[bisect.bisect_right(ends, int(address[1], 16))].append(line)
    return ["\n".join(own) for own in found]


def _code(cubin: bytes) -> bytes:
    """The contents of the code sections of a cubin, which is a 64-bit little-endian ELF file."""
    (headers,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + size * i) for i in range(count)]
    text = sections[names][4]  # where the names of the sections are
    return b"".join(
        cubin[start : start + length]
        for name, _, _, _, start, length in sections
        if cubin.startswith(b".text.", text + name)
    )


def _cuobjdump(cubin: bytes, flag: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([_tool("cuobjdump"), flag, path], check=True, capture_output=True, text=True).stdout


def _tool(name: str) -> Path:
    """A program that comes with Triton."""
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin" / name
