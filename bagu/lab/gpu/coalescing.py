"""Coalescing: threads of a warp read floats that lie `stride` apart; a sector of 32 bytes moves whole."""

from collections.abc import Iterator, Sequence

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, number, where
from bagu.lab.parts.cuda import Kernels, clocked, steady
from bagu.lab.parts.micro import least_s, library, long, pointer
from bagu.lab.plot import Line, Panel
from bagu.machine.timing import measure

WORST = 4.0  # a stride counts as costly from this ratio
READS = 1 << 24  # floats of a measurement

SOURCE = r"""
extern "C" __global__ void strided(const float* x, float* y, int stride, int offset) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, step = (long long)gridDim.x * blockDim.x;
  float a = x[i * stride + offset], b = x[(i + step) * stride + offset];
  float c = x[(i + 2 * step) * stride + offset], d = x[(i + 3 * step) * stride + offset];
  if (a + b + c + d == 12345.f) y[0] = a;
}
"""


def on_gpu(points: Sequence[tuple[int, int]]) -> Iterator[Row]:
    kernels, y = Kernels(SOURCE, expects=("LDG",)), torch.zeros(1, device="cuda")
    x = torch.randn(READS * max(s for s, _ in points) + 64, device="cuda")
    for stride, offset in points:
        seconds = measure(
            lambda stride=stride, offset=offset: kernels("strided", READS // 1024, 256, x, y, stride, offset),  # type: ignore[misc]
            "cuda",
            seconds=0.1,
        ).median_s
        yield {"stride": stride, "offset": offset, "gb_per_s": 4 * READS / seconds / 1e9}


def on_cpu(points: Sequence[tuple[int, int]]) -> Iterator[Row]:
    strided, x, reads = library().strided, torch.ones(1 << 25), 1 << 21
    for stride, offset in points:
        call = lambda s=stride, o=offset: strided(pointer(x[o:]), long(x.numel() // 2 - 1), long(s), long(reads))  # noqa: E731
        yield {"stride": stride, "offset": offset, "gb_per_s": 4 * reads / least_s(call) / 1e9}


def run(setting: Setting) -> Iterator[Row]:
    gpu = setting.device == "cuda"
    strides = (1, 4, 32) if setting.quick else (1, 2, 3, 4, 7, 8, 16, 32)
    points = list(setting.track([*((s, 0) for s in strides), (1, 1), (1, 9)]))
    yield from clocked(on_gpu(points)) if gpu else on_cpu(points)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the largest stride divides the useful bandwidth by WORST or more."""
    aligned = where(rows, offset=0)
    first, last = aligned[0], aligned[-1]
    ratio = number(first, "gb_per_s") / number(last, "gb_per_s")
    off = min(number(r, "gb_per_s") for r in rows if r["offset"]) / number(first, "gb_per_s")
    return steady(
        Verdict.say(
            "held" if ratio >= WORST else "did not hold",
            "Useful GB/s by stride: {each}: a stride of {stride} costs ×{ratio:.1f}. Misaligned by one float: "
            "{off:.0%} of the "
            "aligned rate.",
            "按步长的有效 GB/s：{each}；步长 {stride} 时慢 ×{ratio:.1f}。错开一个浮点数：对齐时的 {off:.0%}。",
            each=", ".join(f"{r['stride']}: {number(r, 'gb_per_s'):,.3g}" for r in aligned),
            stride=last["stride"],
            ratio=ratio,
            off=off,
        ),
        rows,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    line = Line.of(where(rows, offset=0), "stride", "gb_per_s")
    return [Panel([line], "Useful bandwidth", "stride, floats", "GB/s", "log2", "log")]


LAB = Claim(
    title_en="Coalescing",
    title_zh="合并访存",
    claim_en="The threads of a warp must read neighbouring addresses: with a stride most of the bandwidth is lost.",
    claim_zh="一个 warp 的线程必须读取相邻地址：有步长时大部分带宽会浪费。",
    regime="Every float is read once from cold memory. A GPU: all multiprocessors, four loads a thread; a CPU: "
    "one core, C++.",
    varies="Stride, 1 to 32 floats, and an offset of 1 or 9 floats from the aligned address.",
    measures=f"Useful bytes (4 a load) over time. Lost: a stride of 32 divides the rate by {WORST:.0f} or more.",
    evidence="timing",
    published_en="H200, from L1, bytes a cycle and multiprocessor: stride 1 126, 2 64, 4 32, 8 16 "
    "(te42kyfo/gpu-benches, gpu-strides).",
    published_zh="H200，从 L1 读取，每周期每 SM 字节："
    "步长 1 为 126，2 为 64，4 为 32，8 为 16（te42kyfo/gpu-benches，gpu-strides）。",
)
