"""Trees or a Gaussian process: which models a process better, by the rows of its history.

Both are those of `bagu process`: LightGBM in a child process, and an exact Gaussian process (on 2,000 rows at most).
They are fitted to a noisy history and compared with the plant's physics, without noise, on rows of the same operators.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from bagu.errors import BaguError
from bagu.lab.core import Claim, Row, Setting, Verdict, number, numbers_in, share_met, where
from bagu.lab.plot import Line, Panel, Rule
from bagu.process.encode import Encoder
from bagu.process.models import trees
from bagu.process.models.gp import GP
from bagu.process.plants import PLANTS
from bagu.process.plants.history import history

NAMES = ("weld", "coating", "turbojet", "reactor")
COUNTS = (50, 200, 1000, 5000)
TESTED = 1000


def errors(name: str, rows: int, seed: int) -> tuple[float, float]:
    """The RMSE of the trees and of the Gaussian process against the truth, over the truth's standard deviation."""
    plant = PLANTS[name]
    whole = history(plant, rows + TESTED, seed)
    past = whole.first(rows)
    encoder = Encoder.of(past.table, past.schema.inputs)
    x, y = encoder.of_table(past.table), past.table[plant.target].values
    truth = plant.truth(whole.x[rows:], whole.c[rows:])[plant.target]
    probes = encoder.of_table(whole.table)[rows:]
    made = trees.fit_trees(x, y, np.zeros(x.shape[1], int), [np.arange(rows)], seconds=600)
    if made is None:
        raise BaguError("LightGBM did not end in ten minutes", hint="run the lab on an idle machine")
    found = made[0].predict(probes), GP.fit(x, y).predict(probes)
    a, b = (float(np.sqrt(((f - truth) ** 2).mean()) / truth.std()) for f in found)
    return a, b


def run(setting: Setting) -> Iterator[Row]:
    if not trees.offered():
        raise BaguError("this lab needs LightGBM", hint="pip install 'bagu[process]'")
    seeds, names, counts = (1, NAMES[1:2], COUNTS[:2]) if setting.quick else (5, NAMES, COUNTS)
    for rows, name in setting.track([(n, name) for n in counts for name in names]):
        for seed in range(seeds):
            tree, gp = errors(name, rows, 700 + seed)
            yield {"history_rows": rows, "plant": name, "seed": seed, "trees_error": tree, "gp_error": gp}


def ratios(rows: Sequence[Row], count: float) -> list[float]:
    """The trees' error over the Gaussian process's, of each history."""
    return [number(r, "trees_error") / number(r, "gp_error") for r in where(rows, history_rows=count)]


def verdict(rows: Sequence[Row]) -> Verdict:
    """The claim holds at a number of rows if the trees' error is not the larger one, in the geometric mean."""
    counts = sorted(set(numbers_in(rows, "history_rows")))
    means = {n: float(np.exp(np.mean(np.log(ratios(rows, n))))) for n in counts}
    text = ", ".join(f"{n:,.0f}: {r:.2f}" for n, r in means.items())
    return Verdict.say(
        share_met([r <= 1 for r in means.values()]),
        "The trees' error over that of the Gaussian process, by rows of history: {text}.",
        "树的误差与高斯过程误差之比（按历史行数）：{text}。",
        text=text,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    counts = sorted(set(numbers_in(rows, "history_rows")))
    lines = [
        Line(counts, [float(np.mean([number(r, key) for r in where(rows, history_rows=n)])) for n in counts], name)
        for key, name in (("trees_error", "boosted trees"), ("gp_error", "Gaussian process"))
    ]
    spread = [Line([n] * len(ratios(rows, n)), ratios(rows, n), style="o", colour=0, alpha=0.4) for n in counts]
    return [
        Panel(lines, "Error against the truth", "rows", "RMSE / standard deviation", "log", "log"),
        Panel([*spread, Rule(1)], "Trees over Gaussian process", "rows", "ratio of the errors", "log", "log"),
    ]


LAB = Claim(
    title_en="Trees or a Gaussian process",
    title_zh="树还是高斯过程",
    claim_en="Boosted trees are the best model of a table, whatever its number of rows.",
    claim_zh="不论有多少行，提升树都是表格数据的最佳模型。",
    regime="four plants with known physics, five or six smooth inputs, noise of 20 % of the spread; LightGBM, 200 "
    "trees of 15 leaves; an exact Gaussian process",
    varies=f"rows of the history: {', '.join(map(str, COUNTS))}; five histories a plant",
    measures="RMSE against the truth; the claim holds at a number of rows if the trees' error is not the larger one",
)
