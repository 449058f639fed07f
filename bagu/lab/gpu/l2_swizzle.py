"""Program order of a matmul: row by row, or in groups of rows, so that those that run together share operands."""

from collections.abc import Iterator, Sequence
from statistics import median

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, number, numbers_in, share_met, where
from bagu.lab.parts.cuda import clocked
from bagu.lab.plot import Line, Panel
from bagu.machine.timing import measure

FASTER, ROUNDS = 1.05, 3
GROUPS = (1, 2, 4, 8, 16)


def measured(setting: Setting) -> Iterator[Row]:
    """Groups in turn, in rounds: products lower the clock of a GPU, and a round is one clock for all groups."""
    from bagu.lab.parts.tile_matmul import matmul

    sizes = (2048,) if setting.quick else (4096, 8192, 16384)
    for n in setting.track(sizes):
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for turn in range(ROUNDS):
            for group in GROUPS:
                call = lambda a=a, b=b, group=group: matmul(a, b, group=group)  # noqa: E731
                seconds = measure(call, "cuda", flush_l2=False, seconds=0.06).median_s
                yield {"n": n, "round": turn, "group": group, "tflops": 2 * n**3 / seconds / 1e12}


def run(setting: Setting) -> Iterator[Row]:
    yield from clocked(measured(setting))


def gains(rows: Sequence[Row]) -> dict[int, tuple[float, float, int]]:
    """The best group of each size by its rate over that of rows in order: the least and the most of the rounds."""
    found = {}
    for n in numbers_in(rows, "n"):
        rate = {(r["round"], r["group"]): number(r, "tflops") for r in where(rows, n=n)}
        turns = {turn for turn, _ in rate}
        over = {g: sorted(rate[t, g] / rate[t, 1] for t in turns) for g in {g for _, g in rate} - {1}}
        best = max(over, key=lambda g: median(over[g]))
        found[int(n)] = (over[best][0], over[best][-1], int(str(best)))
    return found


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if some group is FASTER at every size. Rounds of a size that do not agree leave it open, unless other sizes
    have decided."""
    found = gains(rows)
    said = Verdict.say(
        share_met(least >= FASTER for least, _, _ in found.values()),
        "The best group against rows in order: {each}.",
        "最好的分组相对逐行顺序：{each}。",
        each="; ".join(f"n = {n:,}: ×{least:.2f}–{most:.2f} ({g})" for n, (least, most, g) in found.items()),
    )
    split = [n for n, (least, most, _) in found.items() if least < FASTER <= most]
    clear = {least >= FASTER for n, (least, _, _) in found.items() if n not in split}
    if split and len(clear) < 2:
        return said.undecided(f"rounds that agree at n = {split[0]:,}.", f"n = {split[0]:,} 时各轮结果一致。")
    return said


def plot(rows: Sequence[Row]) -> list[Panel]:
    lines = [Line.of(where(rows, n=n, round=0), "group", "tflops", f"n = {n:,.0f}") for n in numbers_in(rows, "n")]
    return [Panel(lines, "Matmul by program order", "rows of programs in a group", "TFLOP/s", "log2")]


LAB = Claim(
    title_en="Program order and L2",
    title_zh="程序顺序与 L2",
    claim_en="Ordering the programs of a matmul in groups of rows is faster than row by row, because they share "
    "what is in L2.",
    claim_zh="矩阵乘的程序按若干行分组排列，快于逐行排列，因为它们共享 L2 中的数据。",
    regime="Square bf16 products by a Triton kernel with tiles of 128 × 256 × 64, 8 warps, 3 stages, pointers.",
    varies="Rows of programs in a group, 1 to 16; size 4,096 to 16,384.",
    measures=f"TFLOP/s in {ROUNDS} rounds. Faster: ×{FASTER} or more with the best group in each round.",
    evidence="timing",
    needs_gpu=True,
)
