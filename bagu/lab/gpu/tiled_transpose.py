"""Transpose: reading rows and writing columns, a tile in shared memory, and the same tile padded by a column."""

from collections.abc import Iterator, Sequence

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, number, share_met
from bagu.lab.parts.cuda import Kernels, clocked, steady
from bagu.lab.plot import Bars, Panel
from bagu.machine.timing import measure

FASTER = 1.1

SOURCE = r"""
extern "C" __global__ void naive(const float* x, float* y, int n) {
  long long c = blockIdx.x * 32 + threadIdx.x, r = blockIdx.y * 32 + threadIdx.y;
  for (int k = 0; k < 32; k += 8) y[c * n + r + k] = x[(r + k) * n + c];
}
template <int WIDTH> __device__ void by_tile(const float* x, float* y, int n) {
  __shared__ float s[32][WIDTH];
  long long left = blockIdx.x * 32, top = blockIdx.y * 32;
  for (int k = 0; k < 32; k += 8) s[threadIdx.y + k][threadIdx.x] = x[(top + threadIdx.y + k) * n + left + threadIdx.x];
  __syncthreads();
  for (int k = 0; k < 32; k += 8) y[(left + threadIdx.y + k) * n + top + threadIdx.x] = s[threadIdx.x][threadIdx.y + k];
}
extern "C" __global__ void tiled(const float* x, float* y, int n) { by_tile<32>(x, y, n); }
extern "C" __global__ void padded(const float* x, float* y, int n) { by_tile<33>(x, y, n); }
"""


def measured(setting: Setting) -> Iterator[Row]:
    kernels, n = Kernels(SOURCE, expects=("LDS", "STS")), 2048 if setting.quick else 8192
    x, y = torch.randn(n, n, device="cuda"), torch.empty(n, n, device="cuda")
    ways = {
        way: lambda way=way: kernels(way, (n // 32, n // 32), (32, 8), x, y, n) for way in ("naive", "tiled", "padded")
    } | {"torch": lambda: y.copy_(x.T)}
    for way, call in setting.track(list(ways.items())):
        y.zero_()
        call()
        right = bool(torch.equal(y, x.T))
        yield {"way": way, "right": right, "gb_per_s": 8 * n * n / measure(call, "cuda", seconds=0.1).median_s / 1e9}


def run(setting: Setting) -> Iterator[Row]:
    yield from clocked(measured(setting))


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the tile is faster than the naive kernel and the padding faster than the tile."""
    found = {str(r["way"]): number(r, "gb_per_s") for r in rows}
    return steady(
        Verdict.say(
            share_met([found["tiled"] >= FASTER * found["naive"], found["padded"] >= FASTER * found["tiled"]]),
            "GB/s, read and written: {each}. The tile gives ×{tile:.1f}, padding it ×{pad:.2f} more.",
            "读写 GB/s：{each}。分块 ×{tile:.1f}，补一列再 ×{pad:.2f}。",
            each=", ".join(f"{way} {rate:,.0f}" for way, rate in found.items()),
            tile=found["tiled"] / found["naive"],
            pad=found["padded"] / found["tiled"],
        ),
        rows,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    bars = Bars([number(r, "gb_per_s") for r in rows], colour="each", text="{:,.0f}")
    return [Panel([bars], "Transpose of a square matrix", y="GB/s", xnames=[str(r["way"]) for r in rows])]


LAB = Claim(
    title_en="Transpose by tiles",
    title_zh="分块转置",
    claim_en="A transpose through a tile in shared memory is faster than reading rows and writing columns, and "
    "padding the tile "
    "by a column makes it faster again.",
    claim_zh="经共享内存分块转置，快于按行读、按列写；给分块补一列还会更快。",
    regime="fp32, 8,192 × 8,192 (quick: 2,048), tiles of 32 × 32, blocks of 32 × 8 threads, cold caches.",
    varies="The kernel: naive, tiled, padded; torch's copy.",
    measures=f"Bytes read and written over time. Faster: ×{FASTER} or more.",
    evidence="timing",
    needs_gpu=True,
)
