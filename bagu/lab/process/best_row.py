"""The best row of a history: how much of its result is luck.

Operators of a plant with known physics leave a history of noisy results. The best measured row is compared with what
its settings give in truth, in its own context, in standard deviations of the noise.

    of n rows with equal truth the largest of n normal errors is about sqrt(2 ln n) standard deviations
"""

from collections.abc import Iterator, Sequence

import numpy as np

from bagu.lab.core import Claim, Row, Setting, Verdict, number, numbers_in, where
from bagu.lab.plot import Line, Panel, Rule
from bagu.process.plants import PLANTS
from bagu.process.plants.history import history

NAMES = ("coating", "turbojet", "reactor")
NOISES = (0.05, 0.1, 0.2, 0.4)
COUNTS = (50, 200, 800)


def luck(name: str, rows: int, noise: float, seed: int) -> float:
    """The measured result of the best row less its true result, in spreads of the target; more is always better."""
    plant = PLANTS[name]
    past = history(plant, rows, seed, noise=noise)
    better = 1 if plant.goal == "max" else -1
    measured, truth = past.table[plant.target].values, plant.truth(past.x, past.c)[plant.target]
    best = int((better * measured).argmax())
    return float(better * (measured[best] - truth[best]) / plant.spread[plant.target])


def run(setting: Setting) -> Iterator[Row]:
    seeds = 10 if setting.quick else 100
    for rows, noise in setting.track([(n, s) for n in COUNTS for s in NOISES]):
        found = np.array([luck(name, rows, noise, seed) for name in NAMES for seed in range(seeds)])
        yield {
            "history_rows": rows,
            "noise_percent": 100 * noise,
            "luck_percent": 100 * found.mean(),
            "error_percent": 100 * found.std() / np.sqrt(len(found)),
            "luck_noise_sd": found.mean() / noise,
        }


def verdict(rows: Sequence[Row]) -> Verdict:
    """The claim: measured is true. It holds if the luck of no point is above three standard errors."""
    lucky = [number(r, "luck_percent") > 3 * number(r, "error_percent") for r in rows]
    shares = [number(r, "luck_noise_sd") for r in rows]
    return Verdict.say(
        "held" if not any(lucky) else "did not hold" if all(lucky) else "holds only where",
        "The best row's measured result is better than its true one by {low:.1f} to {high:.1f} standard deviations of "
        "the noise; {some} of {every} points are above three standard errors.",
        "最好一行的实测结果比其真值好 {low:.1f} 到 {high:.1f} 个噪声标准差；{every} 个点中有 {some} 个超过三个标准误。",
        low=min(shares),
        high=max(shares),
        some=sum(lucky),
        every=len(lucky),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    counts = sorted(set(numbers_in(rows, "history_rows")))
    lines = [Line.of(where(rows, history_rows=n), "noise_percent", "luck_noise_sd", f"{n:.0f} rows") for n in counts]
    return [Panel([*lines, Rule(0)], "Luck", "noise, % of the spread", "measured − true, sd of the noise", "log2")]


LAB = Claim(
    title_en="The best row is the luckiest row",
    title_zh="最好的一行是最幸运的一行",
    claim_en="The best row of the history shows what its settings can do: repeat it, and the same result comes back.",
    claim_zh="历史中最好的一行说明了其参数的能力：照做一遍，就会得到同样的结果。",
    regime="three plants with known physics, operators with habits; noise of 5 to 40 % of the target's spread",
    varies="rows of the history (50, 200, 800); noise; 100 histories a plant",
    measures="measured less true result of the best row; the claim fails where it is above three standard errors",
)
