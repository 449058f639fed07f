"""Two forms of momentum: equal at a constant learning rate, different under a schedule.

    classical   v ← μ v − lr g        w ← w + v            (Sutskever et al. 2013)
    torch       v ← μ v + g           w ← w − lr v

With v = −lr · v' they are the same as long as lr does not change; a step of a schedule rescales the whole history in
torch's form and only the new gradient in the classical one.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, column, listed, names_in, number, share_met, where
from bagu.lab.plot import Line, Panel

MU, PEAK = 0.9, 0.02
EQUAL = 1e-10  # relative, of fp64 sums in another order
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "step": lambda t: 1.0 if t < 0.5 else 0.1,
    "cosine": lambda t: 0.5 + 0.5 * math.cos(math.pi * t),
    "warmup": lambda t: min(1.0, 0.01 + 4 * t),
}


def run(setting: Setting) -> Iterator[Row]:
    steps, size = (40, 8) if setting.quick else (400, 64)
    curvature = torch.logspace(-2, 0, size, dtype=torch.float64)
    for name in setting.track(list(SCHEDULES)):
        start = torch.ones(size, dtype=torch.float64)
        w, v, theirs = start.clone(), torch.zeros_like(start), start.clone().requires_grad_()
        optimizer = torch.optim.SGD([theirs], lr=PEAK, momentum=MU)
        for step in range(steps):
            lr = PEAK * SCHEDULES[name](step / steps)
            v = MU * v - lr * curvature * w
            w = w + v
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            (0.5 * curvature * theirs.square()).sum().backward()
            optimizer.step()
            yield {
                "schedule": name,
                "step": step + 1,
                "difference": float((w - theirs.detach()).norm() / start.norm()),
                "classical_loss": float((0.5 * curvature * w.square()).sum()),
                "torch_loss": float((0.5 * curvature * theirs.detach().square()).sum()),
            }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if both forms give the same weights under every schedule."""
    most = {name: max(column(where(rows, schedule=name), "difference")) for name in names_in(rows, "schedule")}
    same = [name for name, difference in most.items() if difference <= EQUAL]
    ends = [where(rows, schedule=name)[-1] for name in most]
    losses = listed(f"{r['schedule']} ×{number(r, 'torch_loss') / number(r, 'classical_loss'):.3g}" for r in ends)
    return Verdict.say(
        share_met(name in same for name in most),
        "Largest difference of the weights, of their first norm: {each}. torch's last loss over the classical one: "
        "{losses}.",
        "权重的最大差异（相对初始范数）：{each}。torch 形式与经典形式的末步损失之比：{losses}。",
        each=listed(f"{name} {difference:.1e}" for name, difference in most.items()),
        losses=losses,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    lines = [
        Line.of(where(rows, schedule=name), "step", lambda r: max(number(r, "difference"), 1e-17), name, "-")
        for name in names_in(rows, "schedule")
    ]
    return [Panel(lines, "Difference of the two forms", "step", "of the first norm of the weights", yscale="log")]


LAB = Claim(
    title_en="Two forms of momentum",
    title_zh="动量的两种写法",
    claim_en="v = μv − lr·g and torch's v = μv + g with w −= lr·v are the same method.",
    claim_zh="v = μv − lr·g 与 torch 的 v = μv + g、w −= lr·v 是同一种方法。",
    regime=f"A quadratic of 64 dimensions with condition number 100, 400 steps (quick: 8 and 40), fp64, μ = {MU}, "
    f"a peak learning rate of {PEAK}.",
    varies="The schedule of the learning rate: constant, one drop to a tenth, cosine, linear warm-up.",
    measures="Distance of the weights of both forms after each step, and their losses.",
)
