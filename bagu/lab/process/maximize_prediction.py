"""Which rule recommends settings: the largest prediction, the best lower bound near the data, or the best row.

A model of a plant's history recommends in contexts of that history, and the plant's physics says what the settings
give: 0 is the operators' mean in the context, 1 its optimum. The promise is what the rule says of its settings.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from bagu.lab.core import Claim, Row, Setting, Verdict, names_in, number, share_met, where
from bagu.lab.plot import Bars, Panel, Rule
from bagu.process.plants import PLANTS
from bagu.process.plants.history import history
from bagu.process.run import fit_process
from bagu.process.truth import case

NAMES = ("coating", "reactor")  # of turbojet most histories are refused, and the maximum knows no limits of weld
RULES = ("maximum", "bound", "best row")
KEPT = 0.05  # of the possible gain: a promise that is more too high is not kept


def run(setting: Setting) -> Iterator[Row]:
    seeds, contexts, rows = (1, 2, 80) if setting.quick else (12, 4, 200)
    for name, seed in setting.track([(n, s) for n in NAMES for s in range(seeds)]):
        past = history(PLANTS[name], rows, 500 + seed)
        process = fit_process(past.table, past.schema, models=())
        for i in np.random.default_rng(seed).integers(rows, size=contexts):
            found = case(PLANTS[name], past, process, past.c[i])
            if found["gain"] is None:
                continue
            each = (("maximum", "maximum", "maximum_over"), ("bound", "gain", "over"), ("best row", "best_row", None))
            for rule, gain, over in each:
                promised = {} if over is None else {"over_promise_share": found[over]}
                yield {"plant": name, "seed": seed, "rule": rule, "gain_share": found[gain], **promised}


def means(rows: Sequence[Row], plant: str, rule: str) -> tuple[float, float, float]:
    """Mean gain, mean over-promise (NaN where there is no promise), and the share worse than the operators."""
    some = where(rows, plant=plant, rule=rule)
    gains = [number(r, "gain_share") for r in some]
    over = [number(r, "over_promise_share") for r in some if r.get("over_promise_share") is not None]
    return float(np.mean(gains)), float(np.mean(over)) if over else float("nan"), float(np.mean(np.array(gains) < 0))


def verdict(rows: Sequence[Row]) -> Verdict:
    """The claim holds on a plant if the maximum gains as much as the bound and keeps its promise."""
    plants = names_in(rows, "plant")
    largest = {p: means(rows, p, "maximum") for p in plants}
    bound = {p: means(rows, p, "bound") for p in plants}
    good = [largest[p][0] >= bound[p][0] and largest[p][1] <= KEPT for p in plants]
    return Verdict.say(
        share_met(good),
        "The maximum of the prediction gains {a:.2f} of what is possible and promises {b:.2f} too much (the worst "
        "plant); the best lower bound near the data gains {c:.2f} and promises {d:.2f}.",
        "预测的最大值得到可能收益的 {a:.2f}，承诺多出 {b:.2f}（最差的装置）；"
        "数据附近的最好下界得到 {c:.2f}，承诺偏差 {d:.2f}。",
        a=np.mean([v[0] for v in largest.values()]),
        b=max(v[1] for v in largest.values()),
        c=np.mean([v[0] for v in bound.values()]),
        d=max(v[1] for v in bound.values()),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    plants = names_in(rows, "plant")
    gains = [Bars([means(rows, p, rule)[0] for p in plants], rule) for rule in RULES]
    over = [Bars([means(rows, p, rule)[1] for p in plants], rule) for rule in RULES[:2]]
    return [
        Panel(gains, "Gain", y="share of the possible gain", xnames=plants),
        Panel([*over, Rule(KEPT)], "Over-promise", y="promised − true, share of the gain", xnames=plants),
    ]


LAB = Claim(
    title_en="Maximise the prediction",
    title_zh="取预测的最大值",
    claim_en="A good model of the process is enough: the settings with the largest prediction are the best "
    "recommendation, and give what was predicted.",
    claim_zh="有了好的过程模型就够了：预测值最大的参数就是最好的推荐，并且会得到所预测的结果。",
    regime="two plants with known physics, 200 rows of history with noise of 20 % of the spread, a Gaussian process",
    varies="the rule: maximum of the prediction in the box, best lower bound near the data, settings of the best row",
    measures=f"gain and over-promise; the claim holds on a plant if the maximum gains as much and promises at most "
    f"{KEPT} of the gain too much",
)
