"""Program order of a matmul: row by row, or in groups of rows, so that those that run together share operands."""

from collections.abc import Iterator, Sequence

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, number, numbers_in, share_met, where
from bagu.lab.parts.cuda import clocked, steady
from bagu.lab.plot import Line, Panel
from bagu.machine.timing import measure

FASTER = 1.05


def measured(setting: Setting) -> Iterator[Row]:
    from bagu.lab.parts.tile_matmul import matmul

    sizes = (2048,) if setting.quick else (4096, 8192, 16384)
    for n in setting.track(sizes):
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for group in (1, 2, 4, 8, 16):
            call = lambda a=a, b=b, group=group: matmul(a, b, group=group)  # noqa: E731
            seconds = measure(call, "cuda", flush_l2=False, seconds=0.15).median_s
            yield {"n": n, "group": group, "tflops": 2 * n**3 / seconds / 1e12}


def run(setting: Setting) -> Iterator[Row]:
    yield from clocked(measured(setting))


def gains(rows: Sequence[Row]) -> dict[int, tuple[float, int]]:
    """The best group of each size, and its gain over rows in order."""
    found = {}
    for n in numbers_in(rows, "n"):
        own = where(rows, n=n)
        best = max(own, key=lambda r: number(r, "tflops"))
        found[int(n)] = (number(best, "tflops") / number(where(own, group=1)[0], "tflops"), int(number(best, "group")))
    return found


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if some group is FASTER at every size."""
    found = gains(rows)
    return steady(
        Verdict.say(
            share_met(gain >= FASTER for gain, _ in found.values()),
            "The best group against rows in order: {each}.",
            "最好的分组相对逐行顺序：{each}。",
            each="; ".join(f"n = {n:,}: ×{gain:.2f} ({group})" for n, (gain, group) in found.items()),
        ),
        rows,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    lines = [Line.of(where(rows, n=n), "group", "tflops", f"n = {n:,.0f}") for n in numbers_in(rows, "n")]
    return [Panel(lines, "Matmul by program order", "rows of programs in a group", "TFLOP/s", "log2")]


LAB = Claim(
    title_en="Program order and L2",
    title_zh="程序顺序与 L2",
    claim_en="Ordering the programs of a matmul in groups of rows is faster than row by row, because they share "
    "what is in L2.",
    claim_zh="矩阵乘的程序按若干行分组排列，快于逐行排列，因为它们共享 L2 中的数据。",
    regime="Square bf16 products by a Triton kernel with tiles of 128 × 256 × 64, 8 warps, 3 stages, pointers.",
    varies="Rows of programs in a group, 1 to 16; size 4,096 to 16,384.",
    measures=f"TFLOP/s. Faster: ×{FASTER} or more with the best group.",
    evidence="timing",
    needs_gpu=True,
)
