"""Bank conflicts: lanes read shared memory `stride` words apart; 32 banks of 32 bits answer one word each."""

from collections.abc import Iterator, Sequence
from math import gcd

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, number
from bagu.lab.parts.cuda import Kernels, clocked, steady
from bagu.lab.plot import Line, Panel

CLOSE = 0.15  # the share by which a measured ratio may differ from the number of ways
ROUNDS, WARPS = 2048, 8

SOURCE = r"""
extern "C" __global__ void banks(float* y, long long* cycles, int stride, int rounds) {
  __shared__ float s[32 * 65];
  for (int i = threadIdx.x; i < 32 * 65; i += blockDim.x) s[i] = i;
  __syncthreads();
  volatile float* v = s + (threadIdx.x % 32 * stride) % (32 * 65);
  float a = 0, b = 0, c = 0, d = 0;
  long long t = clock64();
#pragma unroll 4
  for (int i = 0; i < rounds; i += 4) { a += v[0]; b += v[0]; c += v[0]; d += v[0]; }
  __syncthreads();
  long long spent = clock64() - t;
  y[threadIdx.x] = a + b + c + d;
  if (!threadIdx.x) cycles[0] = spent;
}
"""


def measured(strides: Sequence[int]) -> Iterator[Row]:
    kernels = Kernels(SOURCE, expects=("LDS",))
    y, cycles = torch.zeros(32 * WARPS, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    for stride in strides:
        for _ in range(2):  # the first run loads the code
            kernels("banks", 1, 32 * WARPS, y, cycles, stride, ROUNDS)
        yield {"stride": stride, "ways": gcd(stride, 32), "cycles": int(cycles.item()) / ROUNDS / WARPS}


def run(setting: Setting) -> Iterator[Row]:
    strides = (1, 4, 32, 33) if setting.quick else (1, 2, 3, 4, 8, 12, 16, 24, 31, 32, 33, 64)
    yield from clocked(measured(list(setting.track(strides))))


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the cycles of a load are those of stride 1 times gcd(stride, 32)."""
    base = number(rows[0], "cycles")
    off = [abs(number(r, "cycles") / base / number(r, "ways") - 1) for r in rows]
    return steady(
        Verdict.say(
            "held" if max(off) <= CLOSE else "did not hold",
            "Cycles of a warp's load by stride: {each}. gcd(stride, 32) predicts the ratio to stride 1 within "
            "{off:.0%}.",
            "按步长，一个 warp 读取一次的周期：{each}。gcd(步长, 32) 预测相对步长 1 的倍数，偏差不超过 {off:.0%}。",
            each=", ".join(f"{r['stride']}: {number(r, 'cycles'):.2f}" for r in rows),
            off=max(off),
        ),
        rows,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    base = number(rows[0], "cycles")
    marks = [
        Line.of(rows, "stride", lambda r: number(r, "cycles") / base, "measured", "o"),
        Line.of(rows, "stride", "ways", "gcd(stride, 32)", "x"),
    ]
    return [Panel(marks, "Time of a load from shared memory", "stride, words", "times stride 1", "log2", "log2")]


LAB = Claim(
    title_en="Bank conflicts",
    title_zh="存储体冲突",
    claim_en="Shared memory has 32 banks of 32 bits: a stride of s words makes a load gcd(s, 32) times as slow, "
    "and padding by "
    "one word mends it.",
    claim_zh="共享内存有 32 个 32 位的存储体：步长 s 个字使读取慢 gcd(s, 32) 倍，补一个字即可避免。",
    regime=f"One block of {WARPS} warps that all read with the same stride, fp32, {ROUNDS:,} loads each.",
    varies="Stride, 1 to 64 words.",
    measures=f"Cycles of the multiprocessor (clock64) for one load of one warp. As claimed: within {CLOSE:.0%}.",
    evidence="timing",
    needs_gpu=True,
)
