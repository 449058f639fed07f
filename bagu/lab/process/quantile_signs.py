"""A quantile tree keeps no sign: what renewing the leaves does to a monotone constraint.

Boosting grows each tree on gradients and refuses splits that break the sign. For squared loss the mean gradient of a
leaf is also its value, and the sum of trees is monotone. For quantile loss the value is renewed: it becomes the
quantile of the leaf's residuals, and nothing holds that one to the sign. Stumps over 32 thresholds show it:

    value(left) <= value(right) is required of the mean gradients, and is not required of the quantiles
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bagu.lab.core import Claim, Row, Setting, Verdict, names_in, number, share_met, where
from bagu.lab.plot import Bars, Panel

STUMPS, RATE, BINS, FEWEST = 150, 0.1, 32, 10
LEVELS = (0.1, 0.5, 0.9)


class Stump(NamedTuple):
    feature: int
    threshold: float
    left: float
    right: float


def sample(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A target that rises with the first input, with noise that grows where the second is large."""
    rng = np.random.default_rng(seed)
    x = rng.random((rows, 2))
    return x, x[:, 0] + np.sin(6 * x[:, 1]) + (0.2 + 0.6 * x[:, 1]) * rng.standard_normal(rows)


def boost(x: np.ndarray, y: np.ndarray, level: float | None) -> list[Stump]:
    """Stumps whose first input may only rise; `level` is the quantile, None the squared loss."""
    at = np.full(len(y), y.mean() if level is None else np.quantile(y, level))
    made: list[Stump] = []
    for _ in range(STUMPS):
        rest = y - at
        gradient = rest if level is None else level - (rest < 0)
        feature, threshold = _split(x, gradient)
        left = x[:, feature] <= threshold
        values = [gradient[side].mean() if level is None else np.quantile(rest[side], level) for side in (left, ~left)]
        made.append(Stump(feature, threshold, RATE * values[0], RATE * values[1]))
        at = at + np.where(left, made[-1].left, made[-1].right)
    return made


def _split(x: np.ndarray, gradient: np.ndarray) -> tuple[int, float]:
    """The split that explains most of the gradient; one of the first input must have the larger mean on its right."""
    best, found = -1.0, (1, 0.5)
    for feature in (0, 1):
        for threshold in np.quantile(x[:, feature], np.arange(1, BINS) / BINS):
            left = x[:, feature] <= threshold
            a, b = gradient[left], gradient[~left]
            if min(len(a), len(b)) < FEWEST or (feature == 0 and a.mean() > b.mean()):
                continue
            score = len(a) * a.mean() ** 2 + len(b) * b.mean() ** 2
            if score > best:
                best, found = score, (feature, float(threshold))
    return found


def largest_fall(stumps: Sequence[Stump]) -> float:
    """The largest fall along the first input between neighbouring thresholds, 0 if it only rises."""
    ends = np.array([[s.threshold, s.right - s.left] for s in stumps if s.feature == 0]).reshape(-1, 2)
    total = np.cumsum(ends[np.argsort(ends[:, 0]), 1])
    path = np.r_[0.0, total]
    return float((np.maximum.accumulate(path) - path).max())


def run(setting: Setting) -> Iterator[Row]:
    seeds, rows = (2, 200) if setting.quick else (20, 400)
    for seed in setting.track(range(seeds)):
        x, y = sample(rows, seed)
        for level in (None, *LEVELS):
            name = "squared loss" if level is None else f"quantile {level:g}"
            yield {"loss": name, "seed": seed, "fall_percent": 100 * largest_fall(boost(x, y, level)) / float(y.std())}


def verdict(rows: Sequence[Row]) -> Verdict:
    """The claim holds for a quantile if no history has a fall; the squared loss is the control and must not fall."""
    falls = {name: [number(r, "fall_percent") for r in where(rows, loss=name)] for name in names_in(rows, "loss")}
    plain = max(falls.pop("squared loss"))
    broken = {name: float(np.mean(np.array(v) > 1e-9)) for name, v in falls.items()}
    kind = share_met([share == 0 for share in broken.values()]) if plain < 1e-9 else "did not hold"
    return Verdict.say(
        kind,
        "With squared loss the largest fall is {plain:.2g} % of the spread; with quantile loss {share:.0f} % of the "
        "models fall along the input that may only rise, by up to {worst:.1f} % of the spread.",
        "平方损失下最大的下降为离散度的 {plain:.2g} %；"
        "分位数损失下有 {share:.0f} % 的模型沿着只应上升的输入下降，最多为离散度的 {worst:.1f} %。",
        plain=plain,
        share=100 * np.mean(list(broken.values())),
        worst=max(max(v) for v in falls.values()),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    losses = names_in(rows, "loss")
    falls = [[number(r, "fall_percent") for r in where(rows, loss=name)] for name in losses]
    return [
        Panel([Bars([max(v) for v in falls], colour="each")], "Largest fall", y="% of the spread", xnames=losses),
        Panel(
            [Bars([100 * float(np.mean(np.array(v) > 1e-9)) for v in falls], colour="each")],
            "Models that fall",
            y="% of the models",
            xnames=losses,
        ),
    ]


LAB = Claim(
    title_en="A quantile tree keeps no sign",
    title_zh="分位数树守不住单调性",
    claim_en="Boosted trees with a monotone constraint are monotone under quantile loss too, so that three of them "
    "give a monotone prediction with a monotone band.",
    claim_zh="带单调约束的提升树在分位数损失下同样单调，因此用三个这样的模型就能得到单调的预测与单调的区间。",
    regime="boosted stumps on two inputs, 400 rows, noise that depends on the second; leaves renewed as libraries do",
    varies="the loss: squared, quantiles 0.1, 0.5 and 0.9; 20 samples",
    measures="the largest fall along the constrained input; the claim holds for a quantile if no sample has one",
)
