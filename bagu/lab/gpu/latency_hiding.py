"""Latency hiding: a multiply-add takes some cycles, and others can start meanwhile: of other warps, or of the same one.

Little's law: in flight = latency × throughput. Independent chains of one warp count as much as further warps.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from bagu.lab.core import Claim, Row, Setting, Text, Verdict, number, numbers_in, where
from bagu.lab.parts.cuda import Kernels, clocked, multiprocessors, steady
from bagu.lab.parts.micro import least_s, library, long
from bagu.lab.plot import Line, Panel
from bagu.machine.timing import measure

CHAINS = (1, 2, 4, 8)
CLOSE = 0.2
ROUNDS = 1 << 14

SOURCE = r"""
template <int CHAINS> __device__ void chains(float* y, int rounds) {
  float a[CHAINS];
#pragma unroll
  for (int c = 0; c < CHAINS; c++) a[c] = threadIdx.x + c;
  for (int i = 0; i < rounds; i += 4) {
#pragma unroll
    for (int u = 0; u < 4; u++)
#pragma unroll
      for (int c = 0; c < CHAINS; c++) a[c] = fmaf(a[c], 1.000001f, 0.5f);
  }
  float s = 0;
#pragma unroll
  for (int c = 0; c < CHAINS; c++) s += a[c];
  y[blockIdx.x * blockDim.x + threadIdx.x] = s;
}
extern "C" __global__ void fma_1(float* y, int n) { chains<1>(y, n); }
extern "C" __global__ void fma_2(float* y, int n) { chains<2>(y, n); }
extern "C" __global__ void fma_4(float* y, int n) { chains<4>(y, n); }
extern "C" __global__ void fma_8(float* y, int n) { chains<8>(y, n); }
"""


def on_gpu(points: Sequence[tuple[int, int]]) -> Iterator[Row]:
    kernels, sms = Kernels(SOURCE, expects=("FFMA",)), multiprocessors()
    y = torch.zeros(sms * 1024, device="cuda")
    for warps, count in points:
        seconds = measure(
            lambda warps=warps, count=count: kernels(f"fma_{count}", sms, 32 * warps, y, ROUNDS),  # type: ignore[misc]
            "cuda",
            flush_l2=False,
            seconds=0.03,
        ).median_s
        yield {"warps": warps, "chains": count, "gflops": 2 * count * ROUNDS * 32 * warps * sms / seconds / 1e9}


def on_cpu(points: Sequence[tuple[int, int]]) -> Iterator[Row]:
    chains, rounds = library().fma_chains, 1 << 18
    for warps, count in points:
        seconds = least_s(lambda count=count: chains(count, long(rounds)))  # type: ignore[misc]
        yield {"warps": warps, "chains": count, "gflops": 2 * count * rounds / seconds / 1e9}


def run(setting: Setting) -> Iterator[Row]:
    gpu = setting.device == "cuda"
    warps = ((4, 16) if setting.quick else (1, 2, 4, 8, 16, 32)) if gpu else (1,)
    points = list(setting.track(list(product(warps, CHAINS))))
    yield from clocked(on_gpu(points)) if gpu else on_cpu(points)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if as many chains in flight give the same rate whether they are of one warp or of several; on one thread, if
    two chains double the rate of one."""
    rate = {(number(r, "warps"), number(r, "chains")): number(r, "gflops") for r in rows}
    few, peak = min(numbers_in(rows, "warps")), max(rate.values())
    pairs = [
        (rate[w, c], rate[w * c / 4, 4])
        for w, c in rate
        if c == 1 and (w * c / 4, 4) in rate and w >= 4 * few  # a warp with 4 chains against 4 warps with one
    ]
    off = max((abs(a / b - 1) for a, b in pairs), default=abs(rate[few, 2] / rate[few, 1] / 2 - 1))
    grown = " – ".join(f"{number(r, 'gflops'):,.3g}" for r in (where(rows, warps=few)[0], where(rows, warps=few)[-1]))
    return steady(
        Verdict.say(
            "held" if off <= CLOSE else "did not hold",
            "1 to 8 chains in the fewest warps give {grown} GFLOP/s; equal products of warps and "
            "chains agree "
            "within {off:.0%}. The most is {peak:,.3g} GFLOP/s.",
            "{few:.0f} 个 warp 时，1 到 8 条链的速率（GFLOP/s）：{grown}；{what}相差不超过 {off:.0%}。"
            "最高 {peak:,.3g} GFLOP/s。",
            few=few,
            what=Text("equal products of warps and chains", "warp 数与链数乘积相同时，速率")
            if pairs
            else Text("two chains and twice the rate of one", "两条链与单链速率的两倍"),
            grown=grown,
            off=off,
            peak=peak,
        ),
        rows,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    if len(numbers_in(rows, "warps")) == 1:
        return [
            Panel([Line.of(rows, "chains", "gflops")], "Multiply-adds of one core", "chains", "GFLOP/s", "log2", "log")
        ]
    lines = [
        Line.of(where(rows, chains=c), lambda r: number(r, "warps") * number(r, "chains"), "gflops", f"{c} chains")
        for c in CHAINS
    ]
    return [Panel(lines, "Multiply-adds", "warps × chains on a multiprocessor", "GFLOP/s", "log2", "log")]


LAB = Claim(
    title_en="Latency hiding",
    title_zh="隐藏延迟",
    claim_en="What hides latency is the number of independent operations in flight, be they of many warps or of one.",
    claim_zh="隐藏延迟靠的是同时在途的独立操作数，来自许多 warp 还是一个 warp 都一样。",
    regime="Chains of dependent fp32 multiply-adds in registers. A GPU: one block on each multiprocessor; a CPU: "
    "one thread, "
    "scalar, C++.",
    varies="Independent chains of a thread, 1 to 8; on a GPU warps of a multiprocessor, 1 to 32.",
    measures=f"Multiply-adds over time. As claimed: the rates of 4 warps with one chain and of one warp with 4 "
    f"agree within {CLOSE:.0%}.",
    evidence="timing",
)
