"""Cache bandwidth: all multiprocessors read a working set again and again, past L1; on a CPU one core in C++."""

from collections.abc import Iterator, Sequence

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, column, number
from bagu.lab.parts.cuda import Kernels, clocked, multiprocessors, steady
from bagu.lab.parts.micro import least_s, library, long, pointer
from bagu.lab.plot import Line, Panel
from bagu.machine.timing import measure

MIB = 1 << 20
FASTER = 1.5  # a cache is worth its name from this ratio to main memory
TOTAL = 4 << 30  # bytes of a measurement on a GPU

SOURCE = r"""
extern "C" __global__ void read_all(const float4* x, float* y, int mask, int rounds) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  float a = 0, b = 0, c = 0, d = 0;
  for (int r = 0; r < rounds; r += 4) {
    float4 p = __ldcg(x + (i & mask)), q = __ldcg(x + ((i + step) & mask));
    float4 s = __ldcg(x + ((i + 2 * step) & mask)), t = __ldcg(x + ((i + 3 * step) & mask));
    a += p.x + p.y + p.z + p.w; b += q.x + q.y + q.z + q.w;
    c += s.x + s.y + s.z + s.w; d += t.x + t.y + t.z + t.w;
    i += 4 * step;
  }
  if (a + b + c + d == 12345.f) y[0] = a;
}
"""


def on_gpu(sizes: Sequence[int]) -> Iterator[Row]:
    kernels, blocks, threads = Kernels(SOURCE, expects=("LDG.E.128",)), 2 * multiprocessors(), 1024
    y = torch.zeros(1, device="cuda")
    for size in sizes:
        x = torch.randn(size // 4, device="cuda")
        rounds = max(4, TOTAL // (blocks * threads * 16) // 4 * 4)
        seconds = measure(
            lambda x=x, rounds=rounds: kernels("read_all", blocks, threads, x, y, x.numel() // 4 - 1, rounds),  # type: ignore[misc]
            "cuda",
            flush_l2=False,
            seconds=0.1,
        ).median_s
        yield {"size_bytes": size, "gb_per_s": blocks * threads * rounds * 16 / seconds / 1e9}


def on_cpu(sizes: Sequence[int]) -> Iterator[Row]:
    strided, reads = library().strided, 1 << 22
    for size in sizes:  # a float of each line: what is moved are whole lines
        x = torch.ones(size // 4)
        seconds = least_s(lambda x=x: strided(pointer(x), long(x.numel() - 1), long(16), long(reads)))  # type: ignore[misc]
        yield {"size_bytes": size, "gb_per_s": reads * 64 / seconds / 1e9}


def run(setting: Setting) -> Iterator[Row]:
    gpu = setting.device == "cuda"
    sizes = [MIB << i for i in range(11)] if gpu else [MIB // 64 << i for i in range(14)]
    points = list(setting.track(sizes[::4] if setting.quick else sizes))
    yield from clocked(on_gpu(points)) if gpu else on_cpu(points)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the best cache-resident rate is at least FASTER times that of the largest working set."""
    best, last = max(column(rows, "gb_per_s")), number(rows[-1], "gb_per_s")
    ends = [number(r, "size_bytes") / MIB for r in rows if number(r, "gb_per_s") >= (best * last) ** 0.5]
    return steady(
        Verdict.say(
            "held" if best >= FASTER * last else "did not hold",
            "Read at most {best:,.0f} GB/s from the caches and {last:,.0f} GB/s from memory, ×{ratio:.1f}; the "
            "rate falls "
            "beyond a working set of {end:g} MiB.",
            "从缓存读取最快 {best:,.0f} GB/s，从内存 {last:,.0f} GB/s，×{ratio:.1f}；工作集超过 {end:g} MiB 后下降。",
            best=best,
            last=last,
            ratio=best / last,
            end=max(ends),
        ),
        rows,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    line = Line.of(rows, lambda r: number(r, "size_bytes") / MIB, "gb_per_s")
    return [Panel([line], "Read bandwidth", "working set, MiB", "GB/s", "log2", "log")]


LAB = Claim(
    title_en="Cache bandwidth",
    title_zh="缓存带宽",
    claim_en="What fits into the cache is read at a multiple of the bandwidth of main memory.",
    claim_zh="放得进缓存的数据，读取带宽是主存的数倍。",
    regime="Reads only, each address again and again. A GPU: all multiprocessors, 16 bytes a load, past L1, so "
    "that L2 and DRAM "
    "are seen; a CPU: one core, one float of each line of 64 bytes.",
    varies="Size of the working set: 1 MiB to 1 GiB on a GPU, 16 KiB to 128 MiB on a CPU.",
    measures=f"Bytes over time; on a CPU whole lines and CPU time. A multiple: ×{FASTER} or more.",
    evidence="timing",
    published_en="H200, read: 10.2 TB/s at 7 MB, 9.1 at 44 MB, 3.89 TB/s beyond 130 MB (te42kyfo/gpu-benches, "
    "gpu-l2-cache).",
    published_zh="H200 读取：7 MB 时 10.2 TB/s，"
    "44 MB 时 9.1，超过 130 MB 为 3.89 TB/s（te42kyfo/gpu-benches，gpu-l2-cache）。",
)
