"""Random split, forward split: which score tells how a model does on tomorrow's rows.

A reactor's history in batches of five, with a hidden state of each batch that walks at random (wear, a raw material).
Models are scored by cross-validation on random rows, on other batches, and on later rows; then the next 100 rows come.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from bagu.lab.core import Claim, Row, Setting, Verdict, number, numbers_in, share_met, where
from bagu.lab.plot import Line, Panel
from bagu.process.plants import PLANTS
from bagu.process.plants.history import BATCH, History, history
from bagu.process.run import fit_process

WALKS = (0.0, 0.1, 0.2, 0.4)  # of the hidden state from batch to batch, as a share of the target's spread
SPLITS = ("random", "group", "forward")
CLOSE = 0.05  # of R²


def drifting(rows: int, walk: float, seed: int) -> History:
    past = history(PLANTS["reactor"], rows, seed, batches=True)
    steps = walk * past.plant.spread["yield"] * np.random.default_rng(seed).standard_normal(-(-rows // BATCH))
    hidden = np.repeat(np.cumsum(steps), BATCH)[:rows]
    columns = tuple(replace(c, values=c.values + hidden) if c.name == "yield" else c for c in past.table.columns)
    return replace(past, table=replace(past.table, columns=columns))


def run(setting: Setting) -> Iterator[Row]:
    seeds, rows, later = (2, 100, 50) if setting.quick else (12, 200, 100)
    for walk in setting.track(WALKS):
        for seed in range(seeds):
            whole = drifting(rows + later, walk, 300 + seed)
            made = fit_process(whole.first(rows).table, whole.schema, models=())
            next_rows = whole.table.take(np.arange(rows, rows + later))
            found = made.goal.model.predict(made.encoder.of_table(next_rows)).mean
            y = next_rows["yield"].values
            tomorrow = 1 - ((y - found) ** 2).mean() / ((y - made.y.mean()) ** 2).mean()
            scores = {s.split: s.r2 for s in made.goal.scores["ensemble"]}
            yield {"walk_percent": 100 * walk, "seed": seed, "tomorrow": tomorrow, **{n: scores[n] for n in SPLITS}}


def medians(rows: Sequence[Row], walk: float) -> dict[str, float]:
    """The median over histories of each score, and of tomorrow's."""
    some = where(rows, walk_percent=walk)
    return {n: float(np.median([number(r, n) for r in some])) for n in (*SPLITS, "tomorrow")}


def verdict(rows: Sequence[Row]) -> Verdict:
    """The claim: the random score is that of tomorrow, within 0.05 of R²."""
    walks = sorted(set(numbers_in(rows, "walk_percent")))
    found = [medians(rows, w) for w in walks]
    last = found[-1]
    return Verdict.say(
        share_met([f["random"] - f["tomorrow"] <= CLOSE for f in found]),
        "Without a hidden state R² is {r0:.2f} on random rows and {t0:.2f} tomorrow; with steps of {walk:.0f} % a "
        "batch {r:.2f} on random rows, {g:.2f} on other batches, {f:.2f} on later rows, and {t:.2f} tomorrow.",
        "没有隐藏状态时，随机行上的 R² 为 {r0:.2f}，明天为 {t0:.2f}；每批变动 {walk:.0f} % 时，"
        "随机行 {r:.2f}，其他批次 {g:.2f}，之后的行 {f:.2f}，明天 {t:.2f}。",
        r0=found[0]["random"],
        t0=found[0]["tomorrow"],
        walk=walks[-1],
        r=last["random"],
        g=last["group"],
        f=last["forward"],
        t=last["tomorrow"],
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    walks = sorted(set(numbers_in(rows, "walk_percent")))
    found = [medians(rows, w) for w in walks]
    lines = [Line(walks, [f[n] for f in found], n, "o--" if n == "tomorrow" else "o-") for n in (*SPLITS, "tomorrow")]
    return [Panel(lines, "Scores and tomorrow", "walk of the hidden state, % of the spread a batch", "R²")]


LAB = Claim(
    title_en="Random split, forward split",
    title_zh="随机划分与向前划分",
    claim_en="Cross-validation on random rows tells how well a model will predict the next rows of the process.",
    claim_zh="在随机行上做交叉验证，就能知道模型对过程接下来的行预测得如何。",
    regime="a reactor's history of 200 rows in batches of five, a hidden state that walks at random; the next 100 rows",
    varies="the walk of the hidden state; random rows, other batches, later rows",
    measures=f"median R² over 12 histories; the claim holds where the random score is at most {CLOSE} above tomorrow's",
)
