"""Reduction: the sum of a block by a tree in shared memory, by shuffles between lanes, and by Triton's tl.sum."""

from collections.abc import Callable, Iterator, Sequence

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, number
from bagu.lab.parts.cuda import Kernels, clocked, multiprocessors, steady
from bagu.lab.plot import Bars, Panel
from bagu.machine.timing import measure

THREADS, ROUNDS = 1024, 200
FASTER = 1.2

SOURCE = r"""
extern "C" __global__ void sum_shared(const float* x, float* y, int rounds) {
  __shared__ float s[1024];
  int t = threadIdx.x;
  float v = x[blockIdx.x * 1024 + t], r = 0;
  for (int k = 0; k < rounds; k++) {
    s[t] = v + k;
    __syncthreads();
    for (int o = 512; o; o >>= 1) { if (t < o) s[t] += s[t + o]; __syncthreads(); }
    r += s[0];
    __syncthreads();
  }
  if (!t) y[blockIdx.x] = r;
}
extern "C" __global__ void sum_shuffle(const float* x, float* y, int rounds) {
  __shared__ float s[32];
  int t = threadIdx.x, w = t >> 5, l = t & 31;
  float v = x[blockIdx.x * 1024 + t], r = 0;
  for (int k = 0; k < rounds; k++) {
    float a = v + k;
    for (int o = 16; o; o >>= 1) a += __shfl_xor_sync(~0u, a, o);
    if (!l) s[w] = a;
    __syncthreads();
    a = s[l];
    for (int o = 16; o; o >>= 1) a += __shfl_xor_sync(~0u, a, o);
    r += a;
    __syncthreads();
  }
  if (!t) y[blockIdx.x] = r;
}
"""


def ways(x: torch.Tensor, y: torch.Tensor) -> dict[str, Callable[[], object]]:
    from bagu.lab.parts.tile_matmul import sums

    kernels, blocks = Kernels(SOURCE, expects=("SHFL", "LDS", "BAR.SYNC")), y.numel()
    return {
        "shared tree": lambda: kernels("sum_shared", blocks, THREADS, x, y, ROUNDS),
        "shuffles": lambda: kernels("sum_shuffle", blocks, THREADS, x, y, ROUNDS),
        "tl.sum, 32 warps": lambda: sums[(blocks,)](x, y, ROUNDS, SIZE=THREADS, num_warps=32),
        "tl.sum, 4 warps": lambda: sums[(blocks,)](x, y, ROUNDS, SIZE=THREADS, num_warps=4),
    }


def measured(setting: Setting) -> Iterator[Row]:
    blocks = 2 * multiprocessors()
    x, y = torch.randn(blocks * THREADS, device="cuda"), torch.zeros(blocks, device="cuda")
    right = ROUNDS * x.double().view(blocks, -1).sum(1) + THREADS * ROUNDS * (ROUNDS - 1) / 2
    for way, call in setting.track(list(ways(x, y).items())):
        call()
        error = float(((y.double() - right) / right).abs().max())
        seconds = measure(call, "cuda", flush_l2=False, seconds=0.05 if setting.quick else 0.3).median_s
        yield {"way": way, "sum_ns": 1e9 * seconds / ROUNDS, "error": error}


def run(setting: Setting) -> Iterator[Row]:
    yield from clocked(measured(setting))


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if shuffles are FASTER than the tree, from sums that are right."""
    found = {str(r["way"]): number(r, "sum_ns") for r in rows}
    times = found["shared tree"] / found["shuffles"]
    right = max(number(r, "error") for r in rows) < 1e-4
    return steady(
        Verdict.say(
            "held" if times >= FASTER and right else "did not hold",
            "A sum of 1,024 numbers in two blocks a multiprocessor takes {each}: shuffles ×{times:.1f} as fast "
            "as the tree.",
            "每个 SM 两个线程块，各对 1,024 个数求和：{each}；shuffle 的速度是共享内存树的 ×{times:.1f}。",
            each=", ".join(f"{way} {ns:.0f} ns" for way, ns in found.items()),
            times=times,
        ),
        rows,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    bars = Bars([number(r, "sum_ns") for r in rows], colour="each", text="{:.0f}")
    return [Panel([bars], "Sum of 1,024 numbers in a block", y="ns", xnames=[str(r["way"]) for r in rows])]


LAB = Claim(
    title_en="Reduction",
    title_zh="归约",
    claim_en="A sum over a block is faster by shuffles between lanes than by a tree in shared memory.",
    claim_zh="线程块内求和，用 shuffle 比用共享内存的树快。",
    regime=f"Blocks of {THREADS:,} threads, two on each multiprocessor, fp32, {ROUNDS} sums in a row; Triton's "
    f"tl.sum with 32 and "
    "with 4 warps.",
    varies="How the block sums.",
    measures=f"Time of a launch over its sums; error against fp64. Faster: ×{FASTER} or more.",
    evidence="timing",
    needs_gpu=True,
)
