"""Memory hierarchy: one thread follows a random cycle through lines of memory; each load waits for the one before.

The time of a step is the latency of the level that holds the working set. A GPU's kernels can skip its L1 (ld.cg)
or walk shared memory; a CPU runs the same walk in C++.
"""

from collections.abc import Iterator, Sequence

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, names_in, number, where
from bagu.lab.parts.cuda import Kernels, clocked, steady
from bagu.lab.parts.micro import least_s, library, long, pointer, random_cycle
from bagu.lab.plot import Line, Panel

KIB, MIB = 1 << 10, 1 << 20
FAR = 10.0  # the farthest level takes at least this many times the nearest's
STEPS = 1 << 16
SHARED_BYTES = 32 * KIB

SOURCE = r"""
typedef unsigned long long u64;  // the next address: an index costs a multiply-add a step, some 5 cycles
#define CHASE(name, how)                                                                    \
  extern "C" __global__ void name(const u64* next, u64* at, long long* cycles, int ahead, int steps) { \
    u64 p = at[0];                                                                          \
    for (int i = 0; i < ahead; i++)                                                         \
      asm volatile("ld.global." how ".u64 %0, [%0];" : "+l"(p));                            \
    long long t = clock64();                                                                \
    for (int i = 0; i < steps; i++)                                                         \
      asm volatile("ld.global." how ".u64 %0, [%0];" : "+l"(p));                            \
    cycles[0] = clock64() - t; at[0] = p; }
CHASE(chase_l1, "ca")
CHASE(chase_l2, "cg")
extern "C" __global__ void chase_shared(const u64* next, u64* at, long long* cycles, int ahead, int steps) {
  __shared__ unsigned s[8192];
  unsigned base = (unsigned)__cvta_generic_to_shared(s);
  for (int i = threadIdx.x; i < 8192; i += blockDim.x)
    s[i] = base + (i % 32 ? 0 : (unsigned)(next[i / 2] - (u64)next));
  __syncthreads();
  if (threadIdx.x) return;
  unsigned p = base;
  for (int i = 0; i < ahead; i++) asm volatile("ld.shared.u32 %0, [%0];" : "+r"(p));
  long long t = clock64();
  for (int i = 0; i < steps; i++) asm volatile("ld.shared.u32 %0, [%0];" : "+r"(p));
  cycles[0] = clock64() - t; at[0] = p;
}
"""


def on_gpu(sizes: Sequence[int]) -> Iterator[Row]:
    kernels = Kernels(SOURCE, expects=("LDG", "LDS"))
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    flush = torch.zeros(4 * cache // 8, dtype=torch.int64, device="cuda")
    at, cycles = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
    for size in sizes:
        lines = size // 128
        cycle = torch.zeros(lines * 16, dtype=torch.int64, device="cuda")
        cycle[::16] = cycle.data_ptr() + 4 * random_cycle(lines, 32, "cuda")[::32].long()
        ways = {"through L1": "chase_l1", "past L1": "chase_l2"} | (
            {"shared": "chase_shared"} if size == SHARED_BYTES else {}
        )
        for way, name in ways.items():
            ahead = lines if size < cache else 0  # what fits is walked once before; the rest must come from memory
            flush.zero_()
            at.fill_(cycle.data_ptr())
            kernels(name, 1, 32 if name == "chase_shared" else 1, cycle, at, cycles, ahead, STEPS)
            yield {"way": way, "size_bytes": size, "latency_cycles": int(cycles.item()) / STEPS}


def on_cpu(sizes: Sequence[int]) -> Iterator[Row]:
    chase = library().chase
    for size in sizes:
        cycle = random_cycle(size // 128, 32, "cpu")
        seconds = least_s(lambda cycle=cycle: chase(pointer(cycle), long(STEPS)), runs=3)  # type: ignore[misc]
        yield {"way": "C++", "size_bytes": size, "latency_ns": 1e9 * seconds / STEPS}


def run(setting: Setting) -> Iterator[Row]:
    gpu = setting.device == "cuda"
    sizes = (
        [16, 32, 64, 128, 512, 2048, 8192, 16384, 24576, 32768, 40960, 524288] if gpu else [4 << i for i in range(15)]
    )
    points = setting.track([size * KIB for size in (sizes[::3] if setting.quick else sizes)])
    if not gpu:
        yield from on_cpu(list(points))
        return
    for row in clocked(on_gpu(list(points))):
        clock = row["clock_mhz"]
        yield row | {"latency_ns": 1e3 * number(row, "latency_cycles") / float(clock) if clock else None}


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the largest working set takes at least FAR times the smallest."""
    own = where(rows, way=names_in(rows, "way")[0])
    key = "latency_cycles" if "latency_cycles" in own[0] else "latency_ns"
    unit = {"latency_cycles": "cycles", "latency_ns": "ns"}[key]
    steps = ", ".join(f"{number(r, 'size_bytes') / KIB:,.0f} KiB {number(r, key):.3g}" for r in own)
    times = number(own[-1], key) / number(own[0], key)
    shared = "".join(f" Shared memory: {number(r, key):.1f} {unit}." for r in where(rows, way="shared"))
    return steady(
        Verdict.say(
            "held" if times >= FAR else "did not hold",
            "Latency of a load in {unit} by working set: {steps}: ×{times:.1f} from the nearest to the "
            "farthest.{shared}",
            "按工作集大小，一次读取的延迟（{unit}）：{steps}；最远是最近的 ×{times:.1f}。{shared}",
            unit=unit,
            steps=steps,
            times=times,
            shared=shared,
        ),
        rows,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    key = "latency_cycles" if "latency_cycles" in rows[0] else "latency_ns"
    lines = [
        Line.of(where(rows, way=way), lambda r: number(r, "size_bytes") / KIB, key, way)
        for way in names_in(rows, "way")
    ]
    unit = "cycles" if key == "latency_cycles" else "ns"
    return [Panel(lines, "Latency of a dependent load", "working set, KiB", f"latency, {unit}", "log2", "log")]


LAB = Claim(
    title_en="Memory hierarchy",
    title_zh="存储层次",
    claim_en="Memory is a hierarchy: a load from the farthest level takes ten times as long as one from the "
    "nearest, or more.",
    claim_zh="存储是分层的：从最远一层读取，用时是最近一层的十倍以上。",
    regime="One thread, a random cycle over lines of 128 bytes, every load depends on the one before. A GPU: "
    "kernels through "
    "and past L1, shared memory; a CPU: the same walk in C++.",
    varies="Size of the working set: 16 KiB to 512 MiB on a GPU, 4 KiB to 64 MiB on a CPU.",
    measures=f"Time of a load over {STEPS:,} loads: cycles of the multiprocessor (clock64), or CPU time. Far: "
    f"×{FAR:.0f} or more.",
    evidence="timing",
    published_en="H100 PCIe: L1 34 cycles, L2 265 to about 16 MB and 403 to 475 in its far half, DRAM 650 at 1,755 MHz "
    "(te42kyfo/gpu-benches, gpu-latency).",
    published_zh="H100 PCIe：L1 34 周期，L2 在约 16 MB 内 265、远半区 403 至 475，DRAM 650（1,755 "
    "MHz；te42kyfo/gpu-benches，gpu-latency）。",
)
