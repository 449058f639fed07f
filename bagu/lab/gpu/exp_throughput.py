"""Exponentials: the special-function unit against a polynomial of multiply-adds, as FlashAttention 4 mixes them."""

from collections.abc import Iterator, Sequence

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, number
from bagu.lab.parts.cuda import Kernels, clocked, multiprocessors, steady
from bagu.lab.plot import Bars, Panel
from bagu.machine.timing import measure

ROUNDS, SLOWER = 1 << 16, 4.0  # the multiply-adds take 2 ms: after 0.15 ms a launch would count

SOURCE = r"""
__device__ __forceinline__ float unit(float x) {
  float e;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
  return e;
}
__device__ __forceinline__ float polynomial(float x) {  // x <= 0: 2^x = 2^k · p(x − k), p of degree 3, |error| < 2e-4
  x = fmaxf(x, -126.f);
  float f = x + 12582912.f;  // rounds to an integer in the low bits
  int k = __float_as_int(f);
  x -= f - 12582912.f;
  float p = fmaf(fmaf(fmaf(0.0558f, x, 0.2426f), x, 0.6931f), x, 0.99992f);
  return __int_as_float(__float_as_int(p) + (k << 23));
}
#define KERNEL(name, op)                                                             \
  extern "C" __global__ void name(float* y, int rounds, float m, float b) {          \
    float a[4];                                                                      \
    for (int c = 0; c < 4; c++) a[c] = -1e-3f * threadIdx.x - c;                     \
    _Pragma("unroll 16") for (int i = 0; i < rounds; i++) /* the loop: 3 of 67 */    \
      _Pragma("unroll") for (int c = 0; c < 4; c++) a[c] = op;                       \
    y[blockIdx.x * blockDim.x + threadIdx.x] = a[0] + a[1] + a[2] + a[3]; }
// m and b are registers: with constants in the instructions a multiprocessor does 117 in a cycle, not 122
KERNEL(by_unit, -unit(a[c]))
KERNEL(by_polynomial, -polynomial(a[c]))
KERNEL(by_both, c == 3 ? -polynomial(a[c]) : -unit(a[c]))
KERNEL(multiply_add, fmaf(a[c], m, b))
"""
WAYS = {
    "ex2 unit": "by_unit",
    "polynomial": "by_polynomial",
    "3 unit + 1 polynomial": "by_both",
    "multiply-add": "multiply_add",
}


def measured(setting: Setting) -> Iterator[Row]:
    kernels, blocks = Kernels(SOURCE, expects=("MUFU.EX2", "FFMA")), 2 * multiprocessors()
    y = torch.zeros(blocks * 1024, device="cuda")
    for way, name in setting.track(list(WAYS.items())):
        seconds = measure(
            lambda name=name: kernels(name, blocks, 1024, y, ROUNDS, 0.999, -0.5),  # type: ignore[misc]
            "cuda",
            flush_l2=False,
            seconds=0.03 if setting.quick else 0.2,
        ).median_s
        yield {"way": way, "per_s": 4.0 * ROUNDS * 1024 * blocks / seconds, "multiprocessors": multiprocessors()}


def run(setting: Setting) -> Iterator[Row]:
    for row in clocked(measured(setting)):
        cycles = 1e6 * number(row, "clock_mhz") * number(row, "multiprocessors")
        yield row | {"per_cycle": number(row, "per_s") / cycles}


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the unit gives a quarter of the multiply-adds' rate or less, and mixing in a polynomial is faster."""
    found = {str(r["way"]): number(r, "per_cycle") for r in rows}
    slower = found["multiply-add"] / found["ex2 unit"]
    mixed = found["3 unit + 1 polynomial"] / found["ex2 unit"]
    return steady(
        Verdict.say(
            "held" if slower >= SLOWER and mixed > 1.05 else "did not hold" if slower < SLOWER else "holds only where",
            "Operations of a multiprocessor in a cycle: {each}. The unit gives 1/{slower:.1f} of the "
            "multiply-adds; one "
            "polynomial in four makes the exponentials ×{mixed:.2f} as fast.",
            "每个 SM 每周期的操作数：{each}。特殊函数单元是乘加的 1/{slower:.1f}；"
            "四个里混入一个多项式，指数的速度变为 ×{mixed:.2f}。",
            each=", ".join(f"{way} {n:.1f}" for way, n in found.items()),
            slower=slower,
            mixed=mixed,
        ),
        rows,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    bars = Bars([number(r, "per_cycle") for r in rows], colour="each", text="{:.1f}")
    return [Panel([bars], "Operations per cycle and multiprocessor", xnames=[str(r["way"]) for r in rows])]


LAB = Claim(
    title_en="Throughput of exp",
    title_zh="exp 的吞吐",
    claim_en="Exponentials are the scarce operation of attention: their unit is several times slower than the "
    "multiply-adds, and "
    "computing some by a polynomial helps.",
    claim_zh="指数是注意力里稀缺的运算：特殊函数单元比乘加慢数倍，用多项式计算其中一部分更快。",
    regime="fp32 in registers, two blocks of 1,024 threads on each multiprocessor, four independent chains a thread.",
    varies="ex2 by the special-function unit, by a polynomial of degree 3, one of four by the polynomial; a "
    "multiply-add.",
    measures=f"Operations over time, clock and multiprocessors. Scarce: 1/{SLOWER:.0f} or less; helps: ×1.05 or more.",
    evidence="timing",
    needs_gpu=True,
    published_en="CUDA C++ Programming Guide, throughput of native arithmetic: 16 special functions and 128 fp32 "
    "multiply-adds a "
    "cycle and multiprocessor (compute capability 9.0).",
    published_zh="CUDA C++ 编程指南，算术吞吐：计算能力 9.0 每周期每 SM 16 次特殊函数、128 次 fp32 乘加。",
)
