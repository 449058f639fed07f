"""Divergence: lanes of a warp that take different branches wait for each other; whole warps that differ do not.

A CPU has no warps. What a branch costs there is a wrong prediction: the counterpart is a branch on
sorted or random data.
"""

from collections.abc import Iterator, Sequence

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, names_in, number, share_met, where
from bagu.lab.parts.cuda import Kernels, clocked, steady
from bagu.lab.parts.micro import least_s, library, long, pointer
from bagu.lab.plot import Bars, Line, Panel

ROUNDS = 1000
CLOSE = 0.25  # of the predicted ratio

SOURCE = r"""
extern "C" __global__ void diverge(float* y, long long* cycles, int paths, int by_warp, int rounds) {
  int who = by_warp ? threadIdx.x / 32 : threadIdx.x % 32;
  float a = threadIdx.x;
  __syncthreads();
  long long t = clock64();
#define PATH(k) case k: for (int i = 0; i < rounds; i++) a = fmaf(a, 1.0f + k * 1e-3f, k + 0.5f); break;
  switch (who % paths) {
    PATH(0) PATH(1) PATH(2) PATH(3) PATH(4) PATH(5) PATH(6) PATH(7)
    PATH(8) PATH(9) PATH(10) PATH(11) PATH(12) PATH(13) PATH(14) PATH(15)
  }
  __syncthreads();
  long long spent = clock64() - t;
  y[threadIdx.x] = a;
  if (!threadIdx.x) cycles[0] = spent;
}
extern "C" __global__ void selected(float* y, long long* cycles, int paths, int by_warp, int rounds) {
  float k = threadIdx.x % paths, a = threadIdx.x;
  __syncthreads();
  long long t = clock64();
  for (int i = 0; i < rounds; i++) a = fmaf(a, 1.0f + k * 1e-3f, k + 0.5f);
  __syncthreads();
  long long spent = clock64() - t;
  y[threadIdx.x] = a;
  if (!threadIdx.x) cycles[0] = spent;
}
"""


def on_gpu(counts: Sequence[int]) -> Iterator[Row]:
    kernels = Kernels(SOURCE, expects=("BRX", "FFMA"))
    y, cycles = torch.zeros(512, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    for way, name, by_warp in (("by lane", "diverge", 0), ("by warp", "diverge", 1), ("selected", "selected", 0)):
        for paths in counts:
            for _ in range(2):
                kernels(name, 1, 512, y, cycles, paths, by_warp, ROUNDS)
            yield {"way": way, "paths": paths, "time": int(cycles.item()) / ROUNDS}


def on_cpu() -> Iterator[Row]:
    branches, n = library().branches, 1 << 16
    drawn = torch.randint(0, 2, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for way, data in (("sorted", drawn.sort().values), ("random", drawn)):
        seconds = least_s(lambda data=data: branches(pointer(data), long(n), long(20)))  # type: ignore[misc]
        yield {"way": way, "paths": 2, "time": 1e9 * seconds / n / 20}


def run(setting: Setting) -> Iterator[Row]:
    counts = list(setting.track((1, 2, 16) if setting.quick else (1, 2, 4, 8, 16)))
    yield from clocked(on_gpu(counts)) if setting.device == "cuda" else on_cpu()


def ratio(rows: Sequence[Row], way: str) -> float:
    own = where(rows, way=way)
    return number(own[-1], "time") / number(own[0], "time")


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if lanes cost a factor of the paths and warps do not. A CPU cannot show it: its branches are told only."""
    if names_in(rows, "way") == ["sorted", "random"]:
        first, second = (number(r, "time") for r in rows)
        found = Verdict.say(
            "held",
            "On a CPU a branch takes {first:.2f} ns on sorted and {second:.2f} ns on random data, ×{times:.1f}.",
            "在 CPU 上，一次分支在有序数据上 {first:.2f} ns，在随机数据上 {second:.2f} ns，×{times:.1f}。",
            first=first,
            second=second,
            times=second / first,
        )
        return found.undecided("a GPU: a CPU has no warps.", "需要 GPU：CPU 没有 warp。")
    paths = max(number(r, "paths") for r in rows)
    lane, warp, chosen = (ratio(rows, way) for way in ("by lane", "by warp", "selected"))
    return steady(
        Verdict.say(
            share_met([abs(lane / paths - 1) <= CLOSE, abs(warp - 1) <= CLOSE]),
            "{paths:.0f} paths take ×{lane:.1f} the time if the lanes of a warp differ, ×{warp:.2f} if whole "
            "warps do, and "
            "×{chosen:.2f} as a selected operand without a branch.",
            "{paths:.0f} 条路径：同一 warp 的线程不同时用时 ×{lane:.1f}，"
            "整个 warp 不同时 ×{warp:.2f}，改为选择操作数、不用分支时 ×{chosen:.2f}。",
            paths=paths,
            lane=lane,
            warp=warp,
            chosen=chosen,
        ),
        rows,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    names = names_in(rows, "way")
    if names == ["sorted", "random"]:
        bars = Bars([number(r, "time") for r in rows], colour="each", text="{:.2f}")
        return [Panel([bars], "Time of a branch", y="ns", xnames=names)]
    lines = [Line.of(where(rows, way=way), "paths", "time", way) for way in names]
    return [Panel(lines, "Time of a multiply-add in a branch", "different paths", "cycles", "log2", "log")]


LAB = Claim(
    title_en="Warp divergence",
    title_zh="线程束分歧",
    claim_en="Branches cost their number of paths when the lanes of a warp differ, and nothing when whole warps "
    "differ.",
    claim_zh="同一 warp 的线程走不同分支，用时按路径数成倍增加；整个 warp 不同则没有代价。",
    regime="A GPU: one block of 16 warps, a chain of multiply-adds in each path; a CPU: a branch on 65,536 "
    "sorted or random bytes.",
    varies="Number of paths, 1 to 16; whether lanes or warps differ; the choice as an operand instead of a branch.",
    measures=f"Cycles of the block, or CPU time of a branch. As claimed: within {CLOSE:.0%}.",
    evidence="timing",
)
