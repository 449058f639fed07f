"""TMA: a matmul whose tiles are copied by the tensor memory accelerator (descriptors), against loads by pointers."""

from collections.abc import Iterator, Sequence
from statistics import median

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, names_in, number, where
from bagu.lab.parts.cuda import clocked
from bagu.lab.plot import Bars, Panel
from bagu.machine.timing import measure

FASTER = 1.1
ROUNDS = 5
WAYS = {
    "pointers": {"tma": False},
    "descriptors": {"tma": True},
}


def measured(setting: Setting, ways: dict[str, dict[str, int]]) -> Iterator[Row]:
    """TFLOP/s of each way in rounds: products lower the clock of a GPU, and a round is one clock for all ways. Checked
    against torch; a way that does not compile has no rate and says why."""
    from bagu.lab.parts.tile_matmul import matmul

    n = 2048 if setting.quick else 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    right = a @ b.T
    errors: dict[str, float] = {}
    for way, options in ways.items():
        try:
            errors[way] = float((matmul(a, b, **options) - right).abs().max() / right.abs().max())  # type: ignore[arg-type]
        except Exception as failure:  # the compiler's own classes differ by version
            yield {"way": way, "n": n, "tflops": None, "reason": f"{type(failure).__name__}: {failure}"[:200]}
    for turn in setting.track(range(ROUNDS)):
        for way, error in errors.items():
            call = lambda way=way: matmul(a, b, **ways[way])  # type: ignore[arg-type]  # noqa: E731
            seconds = measure(call, "cuda", flush_l2=False, seconds=0.1).median_s
            rate = 2 * n**3 / seconds / 1e12
            yield {"way": way, "n": n, "round": turn, "tflops": rate, "error": error, "reason": ""}


def run(setting: Setting) -> Iterator[Row]:
    yield from clocked(measured(setting, WAYS))  # type: ignore[arg-type]


def compared(rows: Sequence[Row], faster: float) -> Verdict:
    """Held if the last way is `faster` than the first in every round, did not hold if in none; open otherwise, and if
    one of them did not run or is wrong."""
    failed = [r for r in rows if r["tflops"] is None or number(r, "error") > 0.02]
    rates = {
        way: [number(r, "tflops") for r in where(rows, way=way) if r not in failed] for way in names_in(rows, "way")
    }
    first, *_, last = rates.values()
    ratios = sorted(y / x for x, y in zip(first, last, strict=True)) if not failed else [0.0]
    found = Verdict.say(
        "held" if ratios[0] >= faster else "did not hold",
        "TFLOP/s at n = {n:,}: {rates}.{ratio}",
        "n = {n:,} 时的 TFLOP/s：{rates}。{ratio}",
        n=rows[0]["n"],
        rates=", ".join(f"{way} {median(own):,.0f}" for way, own in rates.items() if own) or "–",
        ratio="" if failed else f" ×{ratios[0]:.2f}–{ratios[-1]:.2f}.",
    )
    if failed:
        return found.undecided(
            f"a compiler that takes {failed[0]['way']}: {failed[0]['reason'] or 'its result is wrong'}.",
            f"能编译 {failed[0]['way']} 的编译器：{failed[0]['reason'] or '结果不对'}。",
        )
    if ratios[0] < faster <= ratios[-1]:
        return found.undecided(
            f"rounds that agree: they gave ×{ratios[0]:.2f}–{ratios[-1]:.2f}, and faster is ×{faster}.",
            f"各轮结果一致：现在是 ×{ratios[0]:.2f}–{ratios[-1]:.2f}，而“更快”是 ×{faster}。",
        )
    return found


def verdict(rows: Sequence[Row]) -> Verdict:
    return compared(rows, FASTER)


def plot(rows: Sequence[Row]) -> list[Panel]:
    shown = [r for r in rows if r["tflops"] is not None]
    ways = [str(way) for way in names_in(shown, "way")]
    bars = Bars(
        [median(number(r, "tflops") for r in where(shown, way=way)) for way in ways], colour="each", text="{:,.0f}"
    )
    return [Panel([bars], "Square bf16 matmul", y="TFLOP/s", xnames=ways)]


LAB = Claim(
    title_en="TMA",
    title_zh="TMA 张量拷贝",
    claim_en="Copying tiles by TMA makes a matmul faster than loads by pointers.",
    claim_zh="用 TMA 拷贝分块，矩阵乘快于用指针读取。",
    regime="A square bf16 product of 8,192 (quick: 2,048) by one Triton kernel, tiles of 128 × 256 × 64, 8 "
    "warps, 3 stages.",
    varies="How tiles are read: pointers, or tensor descriptors, which Hopper copies by TMA.",
    measures=f"TFLOP/s in {ROUNDS} rounds, and the error against torch. Faster: ×{FASTER} or more in each round.",
    evidence="timing",
    needs_gpu=True,
    published_en="A matmul with TMA is up to 1.5 times as fast (arXiv:2501.12084).",
    published_zh="使用 TMA 的矩阵乘最多快 1.5 倍（arXiv:2501.12084）。",
)
