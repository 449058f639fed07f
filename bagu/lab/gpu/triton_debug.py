"""Triton's debugging aids: what needs TRITON_DEBUG. Each case is a process of its own, in Triton's interpreter."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from bagu.lab.core import Claim, Row, Setting, Text, Verdict, names_in, where
from bagu.lab.plot import Bars, Panel

CODE = """
import torch, triton, triton.language as tl

@triton.jit
def kernel(x):
    v = tl.load(x + tl.arange(0, 4))
    {line}

kernel[(1,)](torch.arange(4))
"""
LINES = {"device_print": 'tl.device_print("seen", v)', "device_assert": "tl.device_assert(v < 2)"}


def happened(name: str, debug: bool) -> bool:
    """Whether the aid showed anything: a printed line, or a failed assertion."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_DEBUG"} | {"TRITON_INTERPRET": "1"}
    environment |= {"TRITON_DEBUG": "1"} if debug else {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.py"
        file.write_text(CODE.format(line=LINES[name]))
        done = subprocess.run(
            [sys.executable, str(file)], env=environment, capture_output=True, text=True, check=False, timeout=300
        )
    return "seen" in done.stdout if name == "device_print" else "AssertionError" in done.stderr


def run(setting: Setting) -> Iterator[Row]:
    cases = list(product(LINES, (False, True)))
    for name, debug in setting.track(cases[:2] if setting.quick else cases):
        yield {"name": name, "debug": debug, "happened": happened(name, debug)}


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if device_print shows something only with TRITON_DEBUG."""
    found = {(str(r["name"]), bool(r["debug"])): bool(r["happened"]) for r in rows}
    word = {True: Text("yes", "是"), False: Text("no", "否")}
    return Verdict.say(
        "held" if found["device_print", True] and not found["device_print", False] else "did not hold",
        "In the interpreter device_print shows its values without TRITON_DEBUG: {p0}, with it: {p1}; "
        "device_assert stops without "
        "it: {a0}, with it: {a1}.",
        "在解释器中，device_print 在没有 TRITON_DEBUG 时输出：{p0}，有时："
        "{p1}；device_assert 没有时中止：{a0}，有时：{a1}。",
        p0=word[found["device_print", False]],
        p1=word[found["device_print", True]],
        a0=word[found.get(("device_assert", False), False)],
        a1=word[found.get(("device_assert", True), False)],
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    bars = [
        Bars([float(bool(r["happened"])) for r in where(rows, debug=debug)], "TRITON_DEBUG=1" if debug else "not set")
        for debug in (False, True)
    ]
    return [Panel(bars, "Shown or stopped (1: yes)", xnames=names_in(rows, "name"))]


LAB = Claim(
    title_en="Triton's debugging aids",
    title_zh="Triton 的调试手段",
    claim_en="tl.device_print needs TRITON_DEBUG=1.",
    claim_zh="tl.device_print 需要 TRITON_DEBUG=1。",
    regime="A kernel of one program in Triton's interpreter, a process for each case.",
    varies="device_print, device_assert; TRITON_DEBUG set or not.",
    measures="Whether a value is printed, or the assertion stops the kernel.",
)
