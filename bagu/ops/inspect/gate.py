"""The compile gate: compiles every kernel of every Triton backend for an H200, without a GPU.

`python -m bagu.ops.inspect.gate [--first N] [OP …]` runs each backend's bench cases on meta tensors, records the
launches, and compiles them for sm_90 with the ptxas of Triton. A kernel fails if it spills registers (more than its
spec allows), needs more shared memory than a block has, reads a large aligned tensor without 128-bit loads, or
multiplies 16-bit or int8 matrices without wgmma. TRITON_INTERPRET must be off.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagu.ops.catalogue import SPECS, spec
from bagu.ops.contract.core import Case, OpSpec
from bagu.ops.inspect.offline import Launch, compile_launch, instructions, launches, registers, specialization

SHARED_LIMIT = 232_448  # bytes a block may have on sm_90
REGISTERS = 65_536  # of a multiprocessor
LARGE = 1 << 20  # elements; a smaller tensor has little traffic, so the width of its loads does not matter


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


def kernels(
    specs: Iterable[OpSpec], dtype: torch.dtype = torch.bfloat16, backend: str = "triton", *, first: int | None = None
) -> list[Kernel]:
    """Compile every distinct launch of each op at its bench cases, or only at the `first` N of them."""
    found = []
    for s in specs:
        seen = set()
        print(f"compiling {s.name}", file=sys.stderr, flush=True)
        for case in [c for c in s.cases if c.bench][:first]:
            for launch in launches(s, case, dtype, backend):
                _, _, key = specialization(launch)
                if key not in seen:
                    seen.add(key)
                    found.append((s, case, launch, compile_launch(launch)))
    codes = instructions([compiled.asm["cubin"] for *_, compiled in found])
    return [kernel_of(*one, code) for one, code in zip(found, codes, strict=True)]


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
        found.append(f"{where} multiplies 16-bit or int8 matrices, and not by wgmma")
    return found


def kernel_of(spec: OpSpec, case: Case, launch: Launch, compiled: Any, code: str) -> Kernel:
    dots = _multiplied_rows(launch.fn, compiled.asm)
    large = [a for a in launch.args.values() if isinstance(a, torch.Tensor) and a.numel() >= LARGE]
    aligned = all(a.shape[-1] % 16 == 0 for a in large if a.ndim)
    loads, stores = re.findall(r"\bLDG(?:STS)?\.E[.\w]*", code), re.findall(r"\bSTG\.E[.\w]*", code)
    bulk = len(re.findall(r"\bUTMALDG|\bUBLKCP", code))
    return Kernel(
        op=spec.name,
        case=case.name,
        name=launch.name,
        registers=registers(compiled.asm["cubin"]),
        threads=32 * compiled.metadata.num_warps,
        spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared=compiled.metadata.shared,
        wide_loads=sum(".128" in op for op in loads) + bulk,
        loads=len(loads) + bulk,
        wide_stores=sum(".128" in op for op in stores),
        stores=len(stores),
        wants_wide=spec.wide_loads and bool(large) and aligned and bool(loads),
        allowed_spills=spec.spills.get(launch.name, 0),
        wgmma=len(re.findall(r"\b[HIQ]GMMA\b", code)),
        # wgmma multiplies 64 rows; a decode has 16
        wants_wgmma=any(m >= 64 for m in dots),
    )


def _multiplied_rows(fn: Any, asm: Mapping[str, str]) -> list[int]:
    """The rows of each product of 16-bit or int8 matrices. A Gluon kernel names the instruction itself."""
    if fn.is_gluon():
        return []
    return [int(m) for m in re.findall(r"tt\.dot .* : tensor<(\d+)x\d+x(?:bf16|f16|i8)>", asm["ttir"])]


def main(argv: Sequence[str]) -> int:
    """Print every kernel of these ops (default: all ops); exit with 1 if a kernel has a fault."""
    parser = argparse.ArgumentParser(prog="python -m bagu.ops.inspect.gate", description=main.__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP")
    parser.add_argument("--first", type=int, metavar="N", help="compile for the first N bench cases of each op")
    asked = parser.parse_args(argv)
    specs = [s for s in [spec(n) for n in asked.ops] or SPECS.values() if "triton" in s.backends]
    compiled = kernels(specs, first=asked.first)
    print("\n".join(map(str, compiled)))
    found = [fault for kernel in compiled for fault in faults(kernel)]
    print("\n".join(found) if found else "no faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
