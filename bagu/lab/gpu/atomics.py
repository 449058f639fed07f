"""Atomics: all threads add to a few addresses, in global memory or first in the shared memory of their block."""

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, number, where
from bagu.lab.parts.cuda import Kernels, clocked, multiprocessors, steady
from bagu.lab.plot import Line, Panel
from bagu.machine.timing import measure

ROUNDS, WAYS = 64, ("global", "shared")
SLOWER = 4.0

SOURCE = r"""
extern "C" __global__ void global(float* y, int mask, int rounds) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = 0; i < rounds; i++) atomicAdd(y + ((t + i) & mask), 1.f);
}
extern "C" __global__ void shared(float* y, int mask, int rounds) {
  __shared__ float s[4096];
  for (int i = threadIdx.x; i <= mask; i += blockDim.x) s[i] = 0.f;
  __syncthreads();
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = 0; i < rounds; i++) atomicAdd(s + ((t + i) & mask), 1.f);
  __syncthreads();
  for (int i = threadIdx.x; i <= mask; i += blockDim.x) atomicAdd(y + i, s[i]);
}
"""


def measured(points: Sequence[tuple[str, int]]) -> Iterator[Row]:
    kernels, blocks = Kernels(SOURCE, expects=("RED",)), 2 * multiprocessors()
    y = torch.zeros(4096, device="cuda")
    for way, bins in points:
        y.zero_()
        kernels(way, blocks, 512, y, bins - 1, ROUNDS)
        right = float(y.double().sum()) == blocks * 512 * ROUNDS  # below 2^24 in each bin fp32 counts exactly
        seconds = measure(
            lambda way=way, bins=bins: kernels(way, blocks, 512, y, bins - 1, ROUNDS),  # type: ignore[misc]
            "cuda",
            flush_l2=False,
            seconds=0.03,
        ).median_s
        yield {"way": way, "bins": bins, "adds_per_s": blocks * 512 * ROUNDS / seconds, "right": right}


def run(setting: Setting) -> Iterator[Row]:
    bins = (1, 32, 4096) if setting.quick else (1, 4, 32, 256, 1024, 4096)
    yield from clocked(measured(list(setting.track(list(product(WAYS, bins))))))


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if one address is SLOWER than thousands."""
    ends = {way: [number(r, "adds_per_s") / 1e9 for r in where(rows, way=way)] for way in WAYS}
    times = ends["global"][-1] / ends["global"][0]
    return steady(
        Verdict.say(
            "held" if times >= SLOWER else "did not hold",
            "Billions of adds a second, one address to the most: global {g0:.3g} to {g1:.3g} (×{times:.1f}), "
            "first in shared "
            "memory {s0:.3g} to {s1:.3g}.",
            "每秒十亿次加法，从一个地址到最多：全局内存 {g0:.3g} 到 {g1:.3g}（×{times:.1f}），"
            "先在共享内存 {s0:.3g} 到 {s1:.3g}。",
            g0=ends["global"][0],
            g1=ends["global"][-1],
            s0=ends["shared"][0],
            s1=ends["shared"][-1],
            times=times,
        ),
        rows,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    lines = [Line.of(where(rows, way=way), "bins", lambda r: number(r, "adds_per_s") / 1e9, way) for way in WAYS]
    return [Panel(lines, "Atomic adds", "different addresses", "10⁹ adds a second", "log2", "log")]


LAB = Claim(
    title_en="Atomics",
    title_zh="原子操作",
    claim_en="Atomic adds to one address are many times slower than adds to many addresses.",
    claim_zh="对同一地址的原子加，比对许多地址慢很多倍。",
    regime="fp32 adds whose result is not read, two blocks of 512 threads on each multiprocessor; neighbouring "
    "lanes take "
    "neighbouring addresses.",
    varies="Number of addresses, 1 to 4,096; global memory, or the block's shared memory first.",
    measures=f"Adds over time. Many times: ×{SLOWER:.0f} or more.",
    evidence="timing",
    needs_gpu=True,
)
