"""`bagu ops show NAME --kernel`: what the compiler made of an op's Triton kernels, without a GPU.

Every launch of the op at a size is compiled for an architecture. The stages of each kernel (TTIR, TTGIR, LLIR, PTX,
SASS) go to a folder; a table shows registers, spills, shared memory, occupancy and what limits it, and the matrix,
TMA and 128-bit instructions in the machine code. `--diff A B` compiles two tunings and prints where they differ.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.padding import Padding

from bagu.bench.harness import plain
from bagu.bench.occupancy import Occupancy, occupancy
from bagu.bench.roofline import costs
from bagu.bench.sizing import bench_inputs, first_tensor
from bagu.bench.units import duration, si
from bagu.errors import ArgumentError, UnknownName
from bagu.ops.contract.core import Case, OpSpec
from bagu.ops.inspect.offline import Launch, compile_launch, disassemble, launches, specialization

STAGES = ("ttir", "ttgir", "llir", "ptx")
INSTRUCTIONS = {  # in SASS. A name has dots after it: HGMMA.64x128x16.F32.BF16
    "wgmma": r"\b[HIQ]GMMA\b",
    "mma": r"\b[HIQD]MMA\b",
    "TMA": r"\b(?:UTMALDG|UTMASTG|UBLKCP)\b",
    "loads": r"\bLDG(?:STS)?\.E[.\w]*",
    "128-bit loads": r"\bLDG(?:STS)?\.E[.\w]*\.128\b",
    "stores": r"\bSTG\.E[.\w]*",
    "128-bit stores": r"\bSTG\.E[.\w]*\.128\b",
    "barriers": r"\bBAR\.SYNC\b",
    "instructions": r"^\s+/\*[0-9a-f]{4,}\*/",
}
H200_COPY, H200_MATMUL = 4.28e12, 788e12  # bytes/s and bf16 FLOP/s, measured (benchmarks/results/nvidia-h200.jsonl)
Tuning = dict[str, dict[str, int]]  # step -> option -> value


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel of an op, compiled."""

    step: str
    kernel: str
    programs: int | None  # the grid; None if it depends on values
    warps: int
    stages: int | None
    registers: int
    spills: int  # local loads and stores in the machine code
    shared: int  # bytes
    occupancy: Occupancy
    counts: Mapping[str, int]  # of INSTRUCTIONS
    folder: str | None


def view(
    spec: OpSpec, case: Case, dtype: torch.dtype, out: Path, *, arch: str = "sm_90", tuning: Tuning | None = None
) -> list[Compiled]:
    """Compile every kernel that the op launches at this case, once each, and write its stages below `out`."""
    occupancy(arch, registers=1, shared=0, warps=1)  # raises for an unknown architecture, before compiling
    found: list[Compiled] = []
    seen = set()
    for launch in launches(spec, case, dtype, tuning=tuning):
        _, _, key = specialization(launch)
        if key not in seen:
            seen.add(key)
            found.append(inspect_launch(launch, arch, out / f"{len(found)}-{launch.step}-{launch.name.strip('_')}"))
    return found


def inspect_launch(launch: Launch, arch: str, folder: Path | None = None) -> Compiled:
    """Compile the kernel of a launch and read its facts; with `folder`, write its stages there."""
    kernel = compile_launch(launch, arch)
    code = disassemble(kernel.asm["cubin"])
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for stage in (stage for stage in STAGES if stage in kernel.asm):  # Gluon has no TTIR
            (folder / f"kernel.{stage}").write_text(kernel.asm[stage])
        (folder / "kernel.sass").write_text(code)
    registers, shared, warps = int(re.search(r"REG:(\d+)", code)[1]), kernel.metadata.shared, kernel.metadata.num_warps  # type: ignore[index]
    return Compiled(
        step=launch.step,
        kernel=launch.name,
        programs=_product(launch.grid),
        warps=warps,
        stages=launch.args.get("STAGES", launch.options.get("num_stages")),
        registers=registers,
        spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared=shared,
        occupancy=occupancy(arch, registers=registers, shared=shared, warps=warps),
        counts={name: len(re.findall(pattern, code, re.MULTILINE)) for name, pattern in INSTRUCTIONS.items()},
        folder=None if folder is None else str(folder),
    )


def _product(grid: Any) -> int | None:
    count = 1
    for n in grid if isinstance(grid, tuple | list) else ():
        count *= int(n)
    return count if isinstance(grid, tuple | list) else None


def parse_tuning(spec: OpSpec, text: str) -> Tuning:
    """ "num_warps=8" or "backward.block=1024,num_warps=4", by step. An option without a step belongs to each step that
    has it. Any value is taken, not only those of the tuning space."""
    space: Mapping[str, Mapping[str, Any]] = getattr(spec.module("triton"), "TUNABLE", {})
    chosen: Tuning = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        step, _, option = name.rpartition(".")
        steps = [s for s in space if option in space[s] and step in ("", s)]
        if not steps:
            known = [f"{s}.{o}" for s, options in space.items() for o in options]
            raise UnknownName.among(f"tuning option of {spec.name}", name, known or ["(none)"])
        if not value.strip().isdecimal():
            raise ArgumentError(f"the tuning has {part!r}; expected OPTION=NUMBER", hint=f"{steps[0]}.{option}=4")
        for s in steps:
            chosen.setdefault(s, {})[option] = int(value)
    return chosen


WIDE = 1000  # columns: more than a table takes
COLUMNS = ("kernel", "warps", "registers", "spills", "shared", "occupancy", "limit", "wgmma", "TMA", "128-bit ld/st")


def _cells(k: Compiled) -> list[str]:
    counts = k.counts
    return [
        f"{k.step} {k.kernel}",
        str(k.warps),
        str(k.registers),
        str(k.spills),
        f"{k.shared:,} B",
        f"{k.occupancy.programs} × {k.warps} warps, {k.occupancy.share:.0%}",
        k.occupancy.limit,
        str(counts["wgmma"] or (f"{counts['mma']} mma" if counts["mma"] else 0)),
        str(counts["TMA"]),
        f"{counts['128-bit loads']}/{counts['loads']}, {counts['128-bit stores']}/{counts['stores']}",
    ]


def show_kernels(
    spec: OpSpec,
    case: Case,
    dtype: torch.dtype,
    console: Console,
    out: Path,
    *,
    arch: str,
    tuning: str = "",
    as_json: bool = False,
) -> None:
    """Compile, write the stages, and print the table."""
    found = view(spec, case, dtype, out, arch=arch, tuning=parse_tuning(spec, tuning))
    if as_json:
        print(json.dumps([asdict(k) for k in found], indent=1))
        return
    console.print(f"[bold]{spec.name}[/]  {case.name}, {str(dtype).removeprefix('torch.')}, compiled for {arch}")
    table = plain(COLUMNS, map(_cells, found), right=[*COLUMNS[1:5], *COLUMNS[7:]])
    if console.measure(table, options=console.options.update(max_width=WIDE)).maximum <= console.width:
        console.print(table)
    else:  # a terminal of 80 columns: the facts of a kernel below its name
        for name, *cells in map(_cells, found):
            facts = " · ".join(f"{head} {cell}" for head, cell in zip(COLUMNS[1:], cells, strict=True))
            console.print(name, Padding(facts, (0, 0, 0, 2)), highlight=False)
    for line in _bounds(spec, case, dtype):
        console.print(line)
    console.print(f"[dim]occupancy: programs per multiprocessor. Stages (ttir, ttgir, llir, ptx, sass) → {out}[/]")


def _bounds(spec: OpSpec, case: Case, dtype: torch.dtype) -> list[str]:
    """The least work of each pass, and the time that it takes an H200 at least."""
    args = bench_inputs(spec, case, dtype, "meta")
    lines = []
    for step, cost in costs(spec, spec.bind(args), first_tensor(spec, args).dtype).items():
        memory, compute = cost.bytes / H200_COPY, cost.flops / H200_MATMUL
        bound = "memory" if memory >= compute else "compute"
        lines.append(
            f"{step:8} {si(cost.bytes, 'B')}, {si(cost.flops, 'FLOP')}: {bound}-bound, "
            f"at least {duration(max(memory, compute))} on an H200"
        )
    return lines


def show_difference(
    spec: OpSpec, case: Case, dtype: torch.dtype, console: Console, out: Path, *, arch: str, tunings: Sequence[str]
) -> None:
    """Compile two tunings and print, for every kernel, the facts that differ."""
    sides = [
        view(spec, case, dtype, out / f"{side}-{text or 'default'}", arch=arch, tuning=parse_tuning(spec, text))
        for side, text in zip("ab", tunings, strict=True)
    ]
    lines: list[Sequence[str]] = []
    for a, b in _pairs(*sides):
        name = f"{(a or b).step} {(a or b).kernel}"  # type: ignore[union-attr]
        if a is None or b is None:
            lines.append((name, "launched", *("no" if k is None else "yes" for k in (a, b))))
            continue
        for fact, left, right in _differences(a, b):
            lines.append((name, fact, left, right))
            name = ""
        if name:
            lines.append((name, "the same", "", ""))
    console.print(f"[bold]{spec.name}[/]  {case.name}, {str(dtype).removeprefix('torch.')}, compiled for {arch}")
    console.print(plain(("kernel", "", *(text or "default" for text in tunings)), lines))
    console.print(f"[dim]stages of both → {out}; compare them with: diff -r {out}/a-* {out}/b-*[/]")


def _pairs(a: Sequence[Compiled], b: Sequence[Compiled]) -> list[tuple[Compiled | None, Compiled | None]]:
    """Kernels of the same step and name beside each other, in order of launch."""
    key = lambda k: (k.step, k.kernel)  # noqa: E731
    names = list(dict.fromkeys([key(k) for k in a] + [key(k) for k in b]))
    pairs: list[tuple[Compiled | None, Compiled | None]] = []
    for name in names:
        left, right = ([k for k in side if key(k) == name] for side in (a, b))
        count = max(len(left), len(right))
        pairs += zip(left + [None] * (count - len(left)), right + [None] * (count - len(right)), strict=True)
    return pairs


def _differences(a: Compiled, b: Compiled) -> list[tuple[str, str, str]]:
    facts = ("programs", "warps", "stages", "registers", "spills", "shared")
    found = [(f, str(getattr(a, f)), str(getattr(b, f))) for f in facts if getattr(a, f) != getattr(b, f)]
    if a.occupancy != b.occupancy:
        left, right = (f"{k.occupancy.share:.0%} ({k.occupancy.limit})" for k in (a, b))
        found.append(("occupancy", left, right))
    found += [(c, str(a.counts[c]), str(b.counts[c])) for c in INSTRUCTIONS if a.counts[c] != b.counts[c]]
    return found
