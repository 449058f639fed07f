"""What Triton chooses: the width of loads, shared memory and barriers in the machine code of kernels that name none.

A case is a kernel and how its addresses lie:

    aligned    neighbouring, from a multiple of 16 bytes, sizes that are multiples of 16
    uneven     neighbouring, but the size of a row or the first address is no such multiple
    strided    with a stride that the programmer passes
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bagu.bench.kernel_view import INSTRUCTIONS
from bagu.lab.core import (
    Claim,
    Row,
    Setting,
    Text,
    Verdict,
    column,
    listed,
    names_in,
    number,
    numbers_in,
    say,
    share_met,
    where,
)
from bagu.lab.parts.new_process import in_new_process
from bagu.lab.plot import Bars, Line, Panel
from bagu.machine.device import triton_interprets
from bagu.ops.inspect.offline import Launch, compile_launch, instructions

FULL = 128  # bits: the widest load of a thread on sm_90
QUICK = ("add", "sum", "transpose", "add n=4097", "add stride=2")
Case = tuple[str, str, bool, dict[str, Any], int]


def cases() -> dict[str, Case]:
    """By its name: kernel, access, whether values cross warps, arguments, warps."""
    x, h = (torch.empty(1 << 20, dtype=dtype, device="meta") for dtype in (torch.float32, torch.float16))
    add = {"x": x, "y": x, "out": x, "n": 4096, "stride": 1, "BLOCK": 1024}
    total = {"x": x, "y": x, "rounds": 16, "SIZE": 1024}
    rows = {"x": x, "out": x, "n": 1024, "BLOCK": 1024}
    turn = {"x": x, "out": x, "rows": 1024, "columns": 1024, "BLOCK": 64}
    dot = {"a": h, "b": h, "c": h, "M": 256, "N": 256, "K": 256, "BM": 64, "BN": 64, "BK": 32}
    dot |= {"GROUP": 8, "TMA": False, "SPECIALIZE": False}
    return {
        "add": ("add", "aligned", False, add, 4),
        "add fp16": ("add", "aligned", False, {**add, "x": h, "y": h, "out": h}, 4),
        "sum, 1 warp": ("sums", "aligned", False, total, 1),
        "sum": ("sums", "aligned", True, total, 4),
        "softmax": ("softmax", "aligned", True, rows, 4),
        "transpose": ("turn", "aligned", True, turn, 4),
        "matmul": ("tiles", "aligned", True, dot, 4),
        "add n=4097": ("add", "uneven", False, {**add, "n": 4097}, 4),
        "add x[1:]": ("add", "uneven", False, {**add, "x": x[1:], "y": x[1:]}, 4),
        "softmax n=1023": ("softmax", "uneven", True, {**rows, "n": 1023}, 4),
        "transpose n=1025": ("turn", "uneven", True, {**turn, "rows": 1025, "columns": 1025}, 4),
        "matmul K=264": ("tiles", "uneven", True, {**dot, "K": 264}, 4),
        "add stride=2": ("add", "strided", False, {**add, "stride": 2}, 4),
        "add stride=16": ("add", "strided", False, {**add, "stride": 16}, 4),
    }


def width(instruction: str) -> int:
    """The bits that a load or store of the machine code moves for a thread: LDG.E.128, LDG.E.U16, LDG.E."""
    found = re.search(r"\.[US]?(8|16|64|128)\b", instruction)
    return int(found[1]) if found else 32


def compiled(quick: bool) -> list[Row]:
    """A row a case."""
    from bagu.lab.parts import plain_kernels, tile_matmul

    chosen = {name: case for name, case in cases().items() if not quick or name in QUICK}
    built = []
    for kernel, _, _, args, warps in chosen.values():
        fn = getattr(plain_kernels, kernel, None) or getattr(tile_matmul, kernel)
        launch = Launch(step="forward", fn=fn, args=args, options={"num_warps": warps}, grid=(1,))
        built.append(compile_launch(launch, "sm_90"))
    rows: list[Row] = []
    codes = instructions([one.asm["cubin"] for one in built])
    for (name, (_, access, crosses, _, _)), one, code in zip(chosen.items(), built, codes, strict=True):
        found = {kind: re.findall(INSTRUCTIONS[kind], code) for kind in ("loads", "stores", "barriers")}
        rows.append(
            {
                "case": name,
                "access": access,
                "crosses_warps": crosses,
                "load_bits": min(map(width, found["loads"])),
                "store_bits": min(map(width, found["stores"])),
                **{kind: len(lines) for kind, lines in found.items()},
                "shared_bytes": int(one.metadata.shared),
            }
        )
    return rows


def run(setting: Setting) -> Iterator[Row]:
    yield from in_new_process(compiled, setting.quick) if triton_interprets() else compiled(setting.quick)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if every load is of the full width, and every exchange between warps has shared memory and barriers."""
    aligned, crossing = where(rows, access="aligned"), where(rows, crosses_warps=True)
    others = [r for r in rows if r["access"] != "aligned"]
    wide, still = ([r for r in some if r["load_bits"] == FULL] for some in (aligned, others))
    placed = [r for r in crossing if r["shared_bytes"] and r["barriers"]]
    narrow = [r for r in others if r not in still]
    by_bits = {bits: names_in(where(narrow, load_bits=bits), "case") for bits in numbers_in(narrow, "load_bits")}
    return Verdict.say(
        share_met([len(wide) == len(aligned), len(placed) == len(crossing), not narrow]),
        "{placed} of {crossing} kernels whose warps exchange values got shared memory ({shared} bytes) and barriers "
        "({barriers}) unasked. {wide} of {aligned} with neighbouring addresses and multiples of 16 load {full} bits at "
        "once, and {still} of {others} with an odd size, an odd address or a stride{narrow}.",
        "{crossing} 个需要 warp 间交换数据的核中，{placed} 个自动得到共享内存（{shared} 字节）与同步（{barriers} 次）。"
        "地址相邻且为 16 的倍数的 {aligned} 个核中，{wide} 个一次读 {full} 位；"
        "大小或地址不是 16 的倍数、或有步长的 {others} 个中，{still} 个如此{narrow}。",
        placed=len(placed),
        crossing=len(crossing),
        shared=span(crossing, "shared_bytes"),
        barriers=span(crossing, "barriers"),
        wide=len(wide),
        aligned=len(aligned),
        full=FULL,
        still=len(still),
        others=len(others),
        narrow=say(" ({each})", "（{each}）", each=listed(map(of_width, by_bits.items()), "; ", "；"))
        if narrow
        else "",
    )


def of_width(found: tuple[float, list[str]]) -> Text:
    bits, names = found
    return say("{bits:.0f} bits: {names}", "{bits:.0f} 位：{names}", bits=bits, names=listed(names, zh="、"))


def span(rows: Sequence[Row], key: str) -> str:
    found = numbers_in(rows, key)
    return f"{found[0]:,.0f}" if len(found) == 1 else f"{found[0]:,.0f}–{found[-1]:,.0f}"


def plot(rows: Sequence[Row]) -> list[Panel]:
    cases = names_in(rows, "case")
    widths = [
        Line(column(own, "load_bits"), [cases.index(str(r["case"])) for r in own], access, "o", size=7)
        for access in names_in(rows, "access")
        for own in [where(rows, access=access)]
    ]
    # None draws nothing: the mark of an empty bar is meant for upright ones
    shared, barriers = (
        Bars([number(r, key) or None for r in rows], text="{:,.0f}", sideways=True)
        for key in ("shared_bytes", "barriers")
    )
    none = [""] * len(cases)
    return [
        Panel(widths, "Narrowest load", "bits", xscale="log2", xlim=(8, 256), ynames=cases, legend="below"),
        Panel([shared], "Shared memory", "bytes", xlim=(0, 34e3), ynames=none),
        Panel([barriers], "Barriers", "in the machine code", xlim=(0, 6), ynames=none),
    ]


LAB = Claim(
    title_en="What Triton chooses",
    title_zh="Triton 自动选择什么",
    claim_en="Triton makes global loads wide and manages shared memory and barriers by itself.",
    claim_zh="Triton 自动完成宽的全局读取，并自动管理共享内存与同步。",
    regime="The Triton of this machine compiles small kernels for sm_90 as a launch with these arguments would; "
    "nothing is run. fp32, matmul fp16; 4 warps.",
    varies="The kernel: add, sum of a block, softmax, transpose, matmul. Its addresses: neighbouring and multiples of "
    "16; an odd size, an odd first address, a row of 264 halves; a stride of 2 or 16.",
    measures=f"In the machine code: bits of the narrowest global load of a thread ({FULL} is full), barriers; bytes of "
    "shared memory.",
)
