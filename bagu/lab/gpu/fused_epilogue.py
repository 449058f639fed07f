"""Fused epilogue: what ReLU costs after a matmul, and so the most that fusing it can gain, by the K of the product."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, number, numbers_in
from bagu.lab.parts.interleaved import best_times
from bagu.lab.plot import Line, Panel, Rule

TWICE = 1.8


def run(setting: Setting) -> Iterator[Row]:
    gpu = setting.device == "cuda"
    n, depths = (4096, (64, 128, 256, 512, 1024, 4096)) if gpu else (1024, (16, 64, 256, 1024))
    dtype = torch.bfloat16 if gpu else torch.float32
    for k in setting.track(depths[::3] if setting.quick else depths):
        a, b = (torch.randn(n, k, device=setting.device, dtype=dtype) for _ in range(2))
        c, out = a @ b.T, torch.empty(n, n, device=setting.device, dtype=dtype)
        ways: dict[str, Callable[[], object]] = {
            "product": partial(torch.mm, a, b.T, out=out),
            "relu": partial(torch.clamp_min, c, 0, out=out),
        }
        found = best_times(ways, setting.device, seconds=0.02 if setting.quick else 0.2)
        yield {
            "n": n,
            "k": k,
            "product_us": 1e6 * found["product"],
            "relu_us": 1e6 * found["relu"],
            "most_gain": 1 + found["relu"] / found["product"],
        }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the most that fusion can gain is TWICE or more at every K."""
    met = [number(r, "most_gain") >= TWICE for r in rows]
    where_met = [int(number(r, "k")) for r, yes in zip(rows, met, strict=True) if yes]
    return Verdict.say(
        "held" if all(met) else "holds only where" if any(met) else "did not hold",
        "If ReLU cost nothing after a product of {n:,} × {n:,} outputs: {each}. Nearly twice at K: {where}.",
        "若 {n:,} × {n:,} 的矩阵乘之后 ReLU 不花时间：{each}。接近两倍的 K：{where}。",
        n=rows[0]["n"],
        each=", ".join(f"K = {r['k']} ×{number(r, 'most_gain'):.2f}" for r in rows),
        where=", ".join(map(str, where_met)) or "–",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    assert numbers_in(rows, "k")
    marks = [Line.of(rows, "k", "most_gain"), Rule(2.0)]
    return [Panel(marks, "The most that fusing ReLU can gain", "K of the product", "speedup", "log2")]


LAB = Claim(
    title_en="A fused epilogue",
    title_zh="融合的尾部运算",
    claim_en="Fusing ReLU into a matmul makes it nearly twice as fast.",
    claim_zh="把 ReLU 融合进矩阵乘，速度接近两倍。",
    regime="A GPU: 4,096 × 4,096 outputs in bf16 by cuBLAS; a CPU: 1,024 × 1,024 in fp32. ReLU is one pass over "
    "the result.",
    varies="K of the product, 64 to 4,096 (CPU: 16 to 1,024).",
    measures=f"Times of the product and of ReLU alone; their sum over the product is the most that fusion can "
    f"gain. Nearly twice: ×{TWICE}.",
    evidence="timing",
)
