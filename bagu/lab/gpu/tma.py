"""TMA: a matmul whose tiles are copied by the tensor memory accelerator (descriptors), against loads by pointers."""

from collections.abc import Iterator, Sequence

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, number
from bagu.lab.parts.cuda import clocked, steady
from bagu.lab.plot import Bars, Panel
from bagu.machine.timing import measure

FASTER = 1.1
WAYS = {
    "pointers": {"tma": False},
    "descriptors": {"tma": True},
}


def measured(setting: Setting, ways: dict[str, dict[str, int]]) -> Iterator[Row]:
    """TFLOP/s of each way, checked against torch; a way that does not compile has no rate and says why."""
    from bagu.lab.parts.tile_matmul import matmul

    n = 2048 if setting.quick else 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    right = a @ b.T
    for way, options in setting.track(list(ways.items())):
        try:
            error = float((matmul(a, b, **options) - right).abs().max() / right.abs().max())  # type: ignore[arg-type]
        except Exception as failure:  # the compiler's own classes differ by version
            yield {"way": way, "n": n, "tflops": None, "reason": f"{type(failure).__name__}: {failure}"[:200]}
            continue
        call = lambda options=options: matmul(a, b, **options)  # noqa: E731
        seconds = measure(call, "cuda", flush_l2=False, seconds=0.3).median_s
        yield {"way": way, "n": n, "tflops": 2 * n**3 / seconds / 1e12, "error": error, "reason": ""}


def run(setting: Setting) -> Iterator[Row]:
    yield from clocked(measured(setting, WAYS))  # type: ignore[arg-type]


def compared(rows: Sequence[Row], faster: float) -> Verdict:
    """Held if the last way is `faster` than the first; open if one of them did not run or is wrong."""
    failed = [r for r in rows if r["tflops"] is None or number(r, "error") > 0.02]
    rates = ", ".join(f"{r['way']} {number(r, 'tflops'):,.0f}" for r in rows if r["tflops"] is not None)
    ratio = 0.0 if failed else number(rows[-1], "tflops") / number(rows[0], "tflops")
    found = Verdict.say(
        "held" if ratio >= faster else "did not hold",
        "TFLOP/s at n = {n:,}: {rates}.{ratio}",
        "n = {n:,} 时的 TFLOP/s：{rates}。{ratio}",
        n=rows[0]["n"],
        rates=rates or "–",
        ratio=f" ×{ratio:.2f}." if ratio else "",
    )
    if failed:
        return found.undecided(
            f"a compiler that takes {failed[0]['way']}: {failed[0]['reason'] or 'its result is wrong'}.",
            f"能编译 {failed[0]['way']} 的编译器：{failed[0]['reason'] or '结果不对'}。",
        )
    return steady(found, rows)


def verdict(rows: Sequence[Row]) -> Verdict:
    return compared(rows, FASTER)


def plot(rows: Sequence[Row]) -> list[Panel]:
    shown = [r for r in rows if r["tflops"] is not None]
    bars = Bars([number(r, "tflops") for r in shown], colour="each", text="{:,.0f}")
    return [Panel([bars], "Square bf16 matmul", y="TFLOP/s", xnames=[str(r["way"]) for r in shown])]


LAB = Claim(
    title_en="TMA",
    title_zh="TMA 张量拷贝",
    claim_en="Copying tiles by TMA makes a matmul faster than loads by pointers.",
    claim_zh="用 TMA 拷贝分块，矩阵乘快于用指针读取。",
    regime="A square bf16 product of 8,192 (quick: 2,048) by one Triton kernel, tiles of 128 × 256 × 64, 8 "
    "warps, 3 stages.",
    varies="How tiles are read: pointers, or tensor descriptors, which Hopper copies by TMA.",
    measures=f"TFLOP/s, and the error against torch. Faster: ×{FASTER} or more.",
    evidence="timing",
    needs_gpu=True,
    published_en="A matmul with TMA is up to 1.5 times as fast (arXiv:2501.12084).",
    published_zh="使用 TMA 的矩阵乘最多快 1.5 倍（arXiv:2501.12084）。",
)
