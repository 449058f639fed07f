"""Waves: equal blocks run in waves of as many as fit; one block more than that is a whole wave more."""

import ctypes
from collections.abc import Iterator, Sequence
from math import ceil

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, number
from bagu.lab.parts.cuda import Kernels, clocked, multiprocessors, steady
from bagu.lab.plot import Line, Panel
from bagu.machine.timing import measure

CYCLES = 200_000  # of a block: about 0.1 ms, long beside a launch
CLOSE = 0.1

SOURCE = r"""
extern "C" __global__ void __launch_bounds__(1024, 2) busy(long long cycles, int* y) {
  long long t = clock64();
  while (clock64() - t < cycles) {}
  if (cycles < 0) y[0] = 1;
}
"""


def measured(setting: Setting) -> Iterator[Row]:
    kernels, fit = Kernels(SOURCE, expects=("CS2R",)), 2 * multiprocessors()  # 2 blocks of 1,024 threads on each
    y, cycles = torch.zeros(1, dtype=torch.int32, device="cuda"), ctypes.c_longlong(CYCLES)
    counts = [1, fit // 2, fit, fit + 1, 2 * fit, 2 * fit + 1, 3 * fit, 3 * fit + 1]
    one = 0.0
    for blocks in setting.track(counts[:4] if setting.quick else counts):
        call = lambda blocks=blocks: kernels("busy", blocks, 1024, cycles, y)  # noqa: E731
        seconds = measure(call, "cuda", flush_l2=False, seconds=0.05).median_s
        one = one or seconds
        yield {"blocks": blocks, "fit": fit, "waves": seconds / one, "predicted": ceil(blocks / fit)}


def run(setting: Setting) -> Iterator[Row]:
    yield from clocked(measured(setting))


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the time is that of one block times the number of waves."""
    off = max(abs(number(r, "waves") / number(r, "predicted") - 1) for r in rows)
    return steady(
        Verdict.say(
            "held" if off <= CLOSE else "did not hold",
            "{fit} blocks fit at once; in times of one block: {each}. Rounding up predicts it within {off:.0%}.",
            "同时能放下 {fit} 个线程块；以一个块的用时为单位：{each}。向上取整的预测偏差不超过 {off:.0%}。",
            fit=rows[0]["fit"],
            each=", ".join(f"{r['blocks']}: {number(r, 'waves'):.2f}" for r in rows),
            off=off,
        ),
        rows,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    marks = [
        Line.of(rows, "blocks", "waves", "measured"),
        Line.of(rows, "blocks", "predicted", "blocks / fit, rounded up", "x"),
    ]
    return [Panel(marks, "Time of equal blocks", "blocks", "times one block")]


LAB = Claim(
    title_en="Waves of blocks",
    title_zh="线程块的波次",
    claim_en="One block more than fits at once takes a whole wave more: the time is that of a block times the "
    "waves, rounded up.",
    claim_zh="比一次能放下的多一个线程块，就多一整个波次：用时是单块用时乘以向上取整的波次数。",
    regime=f"Blocks of 1,024 threads that spin for {CYCLES:,} cycles; two fit on a multiprocessor.",
    varies="Number of blocks, around multiples of what fits.",
    measures=f"Time of a launch over that of one block. As claimed: within {CLOSE:.0%}.",
    evidence="timing",
    needs_gpu=True,
)
