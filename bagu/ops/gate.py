"""The compile gate: compiles every kernel of every Triton backend for an H200, without a GPU.

`python -m bagu.ops.gate [--first N] [OP …]` runs each backend's bench cases on meta tensors, records the launches,
and compiles them for sm_90 with the ptxas that comes with Triton. A kernel fails if it spills registers (more than its
spec allows), needs more shared memory than a block has, reads a large aligned tensor without 128-bit loads, or
multiplies 16-bit matrices without wgmma. TRITON_INTERPRET must be off.
"""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bagu.errors import BackendError
from bagu.machine.device import triton_interprets
from bagu.ops.catalogue import SPECS, spec
from bagu.ops.core import Case, OpSpec, Streams

__all__ = ["Kernel", "faults", "kernels"]

SHARED_LIMIT = 232_448  # bytes a block may have on sm_90
REGISTERS = 65_536  # of a multiprocessor
LARGE = 1 << 20  # elements; a smaller tensor has little traffic, so the width of its loads does not matter
TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.bool: "i1",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One recorded launch: the kernel, its arguments by name, and its options (warps, stages)."""

    fn: Any
    args: Mapping[str, Any]
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The compiled kernel of a launch."""

    op: str
    case: str
    name: str
    registers: int
    threads: int
    spills: int  # local loads and stores in the machine code
    shared: int
    wide_loads: int
    loads: int
    wide_stores: int
    stores: int
    wants_wide: bool
    allowed_spills: int
    wgmma: int  # Hopper's asynchronous matrix-multiply instructions
    wants_wgmma: bool

    def __str__(self) -> str:
        return (
            f"{self.op:24} {self.case:14} {self.name:28} {self.registers:4} registers {self.spills:3} spills "
            f"{self.shared:7} B shared  {self.wide_loads}/{self.loads} loads and "
            f"{self.wide_stores}/{self.stores} stores are 128 bits wide"
        ) + (f", {self.wgmma} wgmma" if self.wgmma else "")


class MetaStreams(Streams):
    """Inputs with a shape and no values."""

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float64, device="meta")

    uniform = normal

    def integers(self, name: str, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    def choice(self, name: str, usual: Any, *others: Any) -> Any:
        return usual


def kernels(
    spec: OpSpec, dtype: torch.dtype = torch.bfloat16, backend: str = "triton", *, first: int | None = None
) -> list[Kernel]:
    """Compile every distinct launch of `spec` at its bench cases, or only at the `first` N of them."""
    seen, found = set(), []
    for case in [c for c in spec.cases if c.bench][:first]:
        for launch in _launches(spec, case, dtype, backend):
            source, options, key = _source(launch)
            if key not in seen:
                seen.add(key)
                found.append(_compile(spec, case, launch, source, options))
    return found


def faults(kernel: Kernel) -> list[str]:
    """The faults of a kernel, one sentence each."""
    found = []
    where = f"{kernel.op}[{kernel.case}] {kernel.name}"
    if kernel.spills > kernel.allowed_spills:
        allowed = f", and {kernel.allowed_spills} are allowed" if kernel.allowed_spills else ""
        found.append(f"{where} spills: {kernel.spills} local loads and stores{allowed}")
    if kernel.registers * kernel.threads > REGISTERS:
        found.append(f"{where} wants {kernel.registers} registers for each of {kernel.threads} threads, of {REGISTERS}")
    if kernel.shared > SHARED_LIMIT:
        found.append(f"{where} wants {kernel.shared} B of shared memory, and a block has {SHARED_LIMIT} B")
    if kernel.wants_wide and not kernel.wide_loads:
        found.append(f"{where} has {kernel.loads} global loads, none of them 128 bits wide")
    if kernel.wants_wgmma and not kernel.wgmma:
        found.append(f"{where} multiplies 16-bit matrices, and not by wgmma")
    return found


def _launches(spec: OpSpec, case: Case, dtype: torch.dtype, backend: str) -> list[Launch]:
    """The launches of a forward, of the one for invariant mode, and of a backward, recorded on meta tensors."""
    module, sig = spec.module(backend), spec.sig
    args = spec.cast(case, spec.inputs(case, MetaStreams()), dtype)
    args = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    with _recorded() as launches:
        results = dict(zip((r.name for r in sig.results), module.forward(**args), strict=True))
        if (invariant := getattr(module, "invariant_forward", None)) is not None:
            with suppress(BackendError):  # refused, as an 8-bit cache is
                invariant(**args)
        if spec.grads:
            known = args | results
            given = {f"d{o}": results[o] for o in spec.differentiable} | {s: known[s] for s in spec.saves}
            more = {}
            if "needs" in inspect.signature(module.backward).parameters:
                more["needs"] = dict.fromkeys(spec.made, True)
            module.backward(**given, **{s.name: args[s.name] for s in sig.scalars}, **more)
    return launches


@contextmanager
def _recorded() -> Iterator[list[Launch]]:
    """Inside, a kernel launch is recorded and not executed."""
    if triton_interprets():
        raise BackendError("the compile gate was asked for with TRITON_INTERPRET set", hint="unset it and start again")
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [p.name for p in self.params]
        bound = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        options = {k: v for k, v in kwargs.items() if k not in names}
        launches.append(Launch(fn=self, args=bound, options=options))

    run = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


def _source(launch: Launch) -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    """The launch as input of the compiler, specialised as in a real launch (for 1 and multiples of 16)."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    signature, constants, attrs = {}, {}, {}
    for i, param in enumerate(launch.fn.params):
        value = launch.args.get(param.name, param.default)
        one = type(value) is int and value == 1 and not param.do_not_specialize
        if param.is_constexpr or value is None or one:
            signature[param.name] = "constexpr"
            constants[(i,)] = value
            continue
        if isinstance(value, torch.Tensor):
            kind, aligned = f"*{TYPES[value.dtype]}", value.storage_offset() * value.element_size() % 16 == 0
        elif isinstance(value, bool):
            kind, aligned = "u1", False
        elif isinstance(value, int):
            kind, aligned = ("i32" if -(2**31) <= value < 2**31 else "i64"), value % 16 == 0
        else:
            kind, aligned = "fp32", False
        signature[param.name] = kind
        if aligned and not param.do_not_specialize:
            attrs[(i,)] = [["tt.divisibility", 16]]
    key = (launch.fn.fn.__qualname__, repr(signature), repr(constants), repr(attrs), repr(launch.options))
    written = GluonASTSource if launch.fn.is_gluon() else ASTSource
    return written(fn=launch.fn, signature=signature, constexprs=constants, attrs=attrs), dict(launch.options), key


def _compile(spec: OpSpec, case: Case, launch: Launch, source: Any, options: dict[str, Any]) -> Kernel:
    import triton
    from triton.backends.compiler import GPUTarget

    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    dots, report = _multiplied_rows(launch.fn, compiled.asm), _disassemble(compiled.asm["cubin"])
    large = [a for a in launch.args.values() if isinstance(a, torch.Tensor) and a.numel() >= LARGE]
    aligned = all(a.shape[-1] % 16 == 0 for a in large if a.ndim)
    loads, stores = re.findall(r"\bLDG(?:STS)?\.E[.\w]*", report), re.findall(r"\bSTG\.E[.\w]*", report)
    bulk = len(re.findall(r"\bUTMALDG|\bUBLKCP", report))
    return Kernel(
        op=spec.name,
        case=case.name,
        name=launch.fn.fn.__name__,
        registers=int(re.search(r"REG:(\d+)", report)[1]),  # type: ignore[index]
        threads=32 * compiled.metadata.num_warps,
        spills=len(re.findall(r"\b(?:LDL|STL)\b", report)),
        shared=compiled.metadata.shared,
        wide_loads=sum(".128" in op for op in loads) + bulk,
        loads=len(loads) + bulk,
        wide_stores=sum(".128" in op for op in stores),
        stores=len(stores),
        wants_wide=spec.wide_loads and bool(large) and aligned and bool(loads),
        allowed_spills=spec.spills.get(launch.fn.fn.__name__, 0),
        wgmma=len(re.findall(r"\bHGMMA\b", report)),
        # wgmma multiplies 64 rows; a decode has 16
        wants_wgmma=any(m >= 64 for m in dots),
    )


def _multiplied_rows(fn: Any, asm: Mapping[str, str]) -> list[int]:
    """The rows of each product of 16-bit matrices. A Gluon kernel names the instruction itself."""
    if fn.is_gluon():
        return []
    return [int(m) for m in re.findall(r"tt\.dot .* : tensor<(\d+)x\d+x(?:bf16|f16)>", asm["ttir"])]


def _disassemble(cubin: bytes) -> str:
    """Resource usage and machine code, from the cuobjdump in the Triton package."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return "".join(
            subprocess.run([tool, flag, path], check=True, capture_output=True, text=True).stdout
            for flag in ("-res-usage", "-sass")
        )


def main(argv: Sequence[str]) -> int:
    """Print every kernel of these ops (default: all ops); exit with 1 if a kernel has a fault."""
    parser = argparse.ArgumentParser(prog="python -m bagu.ops.gate", description=main.__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP")
    parser.add_argument("--first", type=int, metavar="N", help="compile for the first N bench cases of each op")
    asked, found = parser.parse_args(argv), []
    for s in [spec(n) for n in asked.ops] or SPECS.values():
        if "triton" in s.backends:
            for kernel in kernels(s, first=asked.first):
                print(kernel, flush=True)
                found += faults(kernel)
    print("\n".join(found) if found else "no faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
