"""Stale gradients: descent whose gradients are `delay` steps old, as from asynchronous workers."""

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from bagu.lab.core import Claim, Row, Setting, Text, Verdict, listed, number, numbers_in, say, share_met, where
from bagu.lab.plot import Line, Panel

RATES = tuple(0.001 * 2**i for i in range(11))
TARGET, HARM, COUNT = 1e-3, 1.1, 32


def steps_needed(delay: int, lr: float, curvature: torch.Tensor, noise: torch.Tensor) -> int | None:
    """Steps until the loss is TARGET of the first; None if it is not reached."""
    w = torch.ones_like(curvature)
    past = [w.clone() for _ in range(delay + 1)]
    first = float((curvature * w * w).sum())
    for step, n in enumerate(noise, 1):
        w = w - lr * curvature * past[0] * (1 + 0.1 * n)  # relative noise: the optimum can be reached
        past = [*past[1:], w]
        loss = float((curvature * w * w).sum())
        if loss <= TARGET * first:
            return step
        if not loss < 1e6 * first:
            return None
    return None


def run(setting: Setting) -> Iterator[Row]:
    delays, budget, seeds = ((0, 4), 500, 1) if setting.quick else ((0, 1, 2, 4, 8, 16), 4000, 3)
    for delay, seed in setting.track(list(product(delays, range(seeds)))):
        draw = torch.Generator().manual_seed(seed)
        curvature = torch.logspace(-1, 1, COUNT, dtype=torch.float64)
        noise = torch.randn(budget, COUNT, generator=draw, dtype=torch.float64)
        for lr in RATES:
            yield {"delay": delay, "seed": seed, "lr": lr, "steps": steps_needed(delay, lr, curvature, noise)}


def best(rows: Sequence[Row], delay: float) -> tuple[float, float]:
    """The fewest steps at this delay, and the learning rate of them."""
    found = [(number(r, "steps"), number(r, "lr")) for r in where(rows, delay=delay) if r["steps"] is not None]
    return min(found, default=(float("inf"), 0.0))


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if no delay needs more than HARM times the steps, at the best rate of each and at the best without delay."""
    delays = numbers_in(rows, "delay")
    base, rate = best(rows, 0)
    tuned = {d: best(rows, d)[0] / base for d in delays[1:]}
    kept = {d: best([r for r in rows if r["lr"] == rate], d)[0] / base for d in delays[1:]}
    return Verdict.say(
        share_met([*(v <= HARM for v in kept.values()), *(v <= HARM for v in tuned.values())]),
        "Steps to the target against no delay, with its learning rate {rate:.3g} kept: {kept}; with a rate of "
        "their own: {tuned}.",
        "与无延迟相比达到目标的步数，沿用其学习率 {rate:.3g}：{kept}；各自调学习率：{tuned}。",
        rate=rate,
        kept=listed(shown(d, v) for d, v in kept.items()),
        tuned=listed(shown(d, v) for d, v in tuned.items()),
    )


def shown(delay: float, ratio: float) -> Text:
    arrives = ratio < float("inf")
    how = Text(*[f"×{ratio:.2f}"] * 2) if arrives else Text("does not arrive", "达不到")
    return say("{d:.0f} steps old {how}", "延迟 {d:.0f} 步 {how}", d=delay, how=how)


def plot(rows: Sequence[Row]) -> list[Panel]:
    lines = [
        Line.of(
            [r for r in where(rows, delay=d, seed=0) if r["steps"] is not None], "lr", "steps", f"{d:.0f} steps old"
        )
        for d in numbers_in(rows, "delay")
    ]
    return [Panel(lines, "Steps to the target", "learning rate", "steps", "log", "log")]


LAB = Claim(
    title_en="Stale gradients",
    title_zh="陈旧的梯度",
    claim_en="Asynchronous workers waste no time waiting, and their stale gradients do no harm.",
    claim_zh="异步训练不浪费等待时间，陈旧的梯度也没有坏处。",
    regime=f"A quadratic of {COUNT} dimensions with condition number 100, gradients with 10 % relative noise, "
    f"fp64; every gradient is as old.",
    varies="Age of a gradient, 0 to 16 steps; learning rate, 11 values.",
    measures=f"Steps to {TARGET} of the first loss. Harm: more than ×{HARM} the steps.",
)
