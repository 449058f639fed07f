"""Warp specialization: warps that only copy, and warps that only multiply, against warps that do both."""

from collections.abc import Iterator, Sequence

from bagu.lab.core import Claim, Row, Setting, Verdict
from bagu.lab.gpu import tma
from bagu.lab.parts.cuda import clocked
from bagu.lab.plot import Panel

FASTER = 1.05
WAYS = {  # Triton 3.6 specializes the loop of a kernel of 4 warps on Hopper, and adds its own producers
    "8 warps, pipelined": {"tma": True, "warps": 8, "stages": 3},
    "specialized": {"tma": True, "specialize": True, "warps": 4, "stages": 3},
}


def run(setting: Setting) -> Iterator[Row]:
    yield from clocked(tma.measured(setting, WAYS))


def verdict(rows: Sequence[Row]) -> Verdict:
    return tma.compared(rows, FASTER)


def plot(rows: Sequence[Row]) -> list[Panel]:
    return tma.plot(rows)


LAB = Claim(
    title_en="Warp specialization",
    title_zh="线程束专职化",
    claim_en="A matmul with warps that only copy is faster than one whose warps copy and multiply.",
    claim_zh="让一些 warp 专门拷贝，矩阵乘快于所有 warp 既拷贝又计算。",
    regime="A square bf16 product of 8,192 (quick: 2,048) by one Triton kernel with descriptors, tiles of 128 × "
    "256 × 64, 3 stages.",
    varies="Software pipelining with 8 warps, or Triton's warp_specialize, which adds producer warps to 4.",
    measures=f"TFLOP/s in rounds, and the error against torch. Faster: ×{FASTER} or more in each. Open where the "
    "compiler refuses.",
    evidence="timing",
    needs_gpu=True,
)
