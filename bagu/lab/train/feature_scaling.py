"""Feature scaling: steps of gradient descent and of Adam against the ratio of the features' scales.

A linear model with features of standard deviation 1 and `ratio`: the curvature along a feature is the square of its
scale, so the condition number of the loss is ratio². Adam divides each coordinate's step by the size of its gradient.
"""

from collections.abc import Iterator, Sequence

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, listed, number, numbers_in, share_met, where
from bagu.lab.plot import Line, Panel

OPTIMIZERS = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}
RATES = tuple(10.0**e for e in range(-6, 3))
TARGET = 1e-3  # of the first loss
SLOWER = 2.0  # scaling matters if the largest ratio takes this many times the steps of ratio 1
COUNT, SAMPLES = 8, 256


def steps_to_target(name: str, x: torch.Tensor, y: torch.Tensor, budget: int) -> int | None:
    """The fewest steps over the learning rates; None if none reaches the target in the budget."""
    best: int | None = None
    for lr in RATES:
        w = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
        optimizer = OPTIMIZERS[name]([w], lr=lr)
        first = float((y * y).mean())
        for step in range(1, (best or budget) + 1):
            optimizer.zero_grad()
            loss = (x @ w - y).square().mean()
            loss.backward()
            if float(loss.detach()) <= TARGET * first:
                best = step
                break
            if not float(loss.detach()) < 1e6 * first:
                break
            optimizer.step()
    return best


def run(setting: Setting) -> Iterator[Row]:
    ratios, budget = ((1, 10), 80) if setting.quick else ((1, 3, 10, 30, 100), 5000)
    draw = torch.Generator().manual_seed(0)
    clean = torch.randn(SAMPLES, COUNT, generator=draw, dtype=torch.float64)
    truth = torch.randn(COUNT, generator=draw, dtype=torch.float64)
    for ratio in setting.track(ratios):
        scale = torch.where(torch.arange(COUNT) < COUNT // 2, 1.0, 1.0 / ratio).double()
        x, y = clean * scale, clean @ truth  # the same targets: only the units of the features differ
        for name in OPTIMIZERS:
            for normalized in (False, True):
                given = (x - x.mean(0)) / x.std(0) if normalized else x
                steps = steps_to_target(name, given, y - y.mean() if normalized else y, budget)
                yield {"optimizer": name, "normalized": normalized, "ratio": ratio, "steps": steps, "budget": budget}


def slowdown(rows: Sequence[Row], optimizer: str, *, normalized: bool) -> float:
    """Steps at the largest ratio over those at 1; the budget counts where the target is not reached."""
    own = where(rows, optimizer=optimizer, normalized=normalized)
    first, last = (where(own, ratio=numbers_in(own, "ratio")[i])[0] for i in (0, -1))
    taken = [number(r, "budget" if r["steps"] is None else "steps") for r in (first, last)]
    return taken[1] / taken[0]


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if every optimizer needs many more steps without normalized features, and not with them."""
    raw = {name: slowdown(rows, name, normalized=False) for name in OPTIMIZERS}
    scaled = {name: slowdown(rows, name, normalized=True) for name in OPTIMIZERS}
    return Verdict.say(
        share_met(raw[name] >= SLOWER > scaled[name] for name in OPTIMIZERS),
        "With features ×{ratio:g} apart the steps to {target:g} of the loss are those of equal features times: {raw}; "
        "normalized: {scaled}.",
        "特征尺度相差 {ratio:g} 倍时，降到损失 {target:g} 的步数是尺度相同时的：{raw}；归一化之后：{scaled}。",
        ratio=numbers_in(rows, "ratio")[-1],
        target=TARGET,
        raw=listed(f"{name} ×{v:.1f}" for name, v in raw.items()),
        scaled=listed(f"{name} ×{v:.1f}" for name, v in scaled.items()),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    lines = [
        Line.of(
            where(rows, optimizer=name, normalized=normalized),
            "ratio",
            "steps",
            f"{name}{', normalized' * normalized}",
            "o--" if normalized else "o-",
            i,
        )
        for i, name in enumerate(OPTIMIZERS)
        for normalized in (False, True)
    ]
    return [Panel(lines, f"Steps to {TARGET:g} of the loss", "ratio of the scales", "steps", "log", "log")]


LAB = Claim(
    title_en="Feature scaling",
    title_zh="特征缩放",
    claim_en="Without normalized features the largest one dominates, and training needs many more steps.",
    claim_zh="特征不归一化，尺度最大的就会主导，训练需要多得多的步数。",
    regime=f"Linear regression with {COUNT} features and {SAMPLES} samples in fp64, full batches, the best of "
    f"{len(RATES)} learning rates for each.",
    varies="Ratio of the features' scales (1 to 100), optimizer (SGD, Adam), normalized features or not.",
    measures=f"Steps to {TARGET:g} of the first loss. Many more: ×{SLOWER:g} or more at the largest ratio.",
)
