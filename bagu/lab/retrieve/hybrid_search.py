"""Words, vectors, and both: the rank of a function for the first sentence of its docstring, in held-out files.

Words are BM25. Vectors are those of a table (bagu/retrieve/table.py) that has learned from docstrings of other files.
Both are joined by rank (1 / (60 + rank)) and in units of their standard deviation, as `bagu search` does.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean as average

import numpy as np

from bagu.bench.retrieve import docstring_gains
from bagu.data import StdlibSource
from bagu.data.stdlib import documented_functions
from bagu.eval.intervals import estimate
from bagu.lab.core import Claim, Row, Setting, Verdict, column, names_in, share_met, where
from bagu.lab.plot import Bars, Panel

QUERIES, SEEDS = 1000, 3


def run(setting: Setting) -> Iterator[Row]:
    documents = list(StdlibSource().documents())[: 40 if setting.quick else None]
    functions = list(documented_functions(documents, max_bytes=1 << 20))
    queries, steps = (20, 5) if setting.quick else (QUERIES, None)
    for seed in setting.track(range(1 if setting.quick else SEEDS)):
        found = docstring_gains(functions, queries, hybrid=True, installed=not setting.quick, steps=steps, seed=seed)
        words = np.array(found.gains["words"])
        for name, gains in found.gains.items():
            score, more = estimate(gains, found.files), estimate(list(np.array(gains) - words), found.files)
            yield {
                "ranking": name, "seed": seed, "queries": len(gains), "functions": len(functions),
                "pairs": found.pairs, "steps": found.steps, "parameters": found.parameters, "mrr": score.mean,
                "low": score.low, "high": score.high, "more": more.mean, "more_low": more.low, "more_high": more.high,
            }  # fmt: skip


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the vectors and the joined ranking are each above the words, with the intervals of every seed."""
    mean = {name: average(column(where(rows, ranking=name), "mrr")) for name in names_in(rows, "ranking")}
    lows, highs = (
        {name: limit(column(where(rows, ranking=name), key)) for name in ("vectors", "hybrid")}
        for limit, key in ((min, "more_low"), (max, "more_high"))
    )
    return Verdict.say(
        share_met(low > 0 for low in lows.values()),
        "MRR@10, mean of the seeds: words {words:.3f}, vectors {vectors:.3f} ({v_low:+.3f} to {v_high:+.3f} to words, "
        "the widest of the seeds' intervals), both {joined:.3f} ({j_low:+.3f} to {j_high:+.3f}), joined by rank "
        "{ranks:.3f}.",
        "MRR@10，各种子平均：词 {words:.3f}，向量 {vectors:.3f}（比词 {v_low:+.3f} 至 {v_high:+.3f}，"
        "取各种子区间的最外端），"
        "两者合并 {joined:.3f}（{j_low:+.3f} 至 {j_high:+.3f}），按名次合并 {ranks:.3f}。",
        words=mean["words"],
        vectors=mean["vectors"],
        joined=mean["hybrid"],
        ranks=mean["by_rank"],
        v_low=lows["vectors"],
        v_high=highs["vectors"],
        j_low=lows["hybrid"],
        j_high=highs["hybrid"],
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    names = names_in(rows, "ranking")
    means = [average(column(where(rows, ranking=name), "mrr")) for name in names]
    bars = Bars(means, colour="each", text="{:.3f}")
    return [Panel([bars], "Docstring to function", y="MRR@10", xnames=[name.replace("_", " ") for name in names])]


LAB = Claim(
    title_en="Words, vectors, or both",
    title_zh="词、向量，还是两者",
    claim_en="Vectors find what words cannot, so they rank better; words and vectors together are best.",
    claim_zh="向量能找到词找不到的内容，所以排名更好；两者合用最好。",
    regime="Functions of the standard library without their docstrings; queries are first sentences of held-out files. "
    "The table of 256 numbers a term learns from the other files and the installed packages, 200 steps of 1,024 pairs, "
    "three seeds.",
    varies="The ranking: BM25, cosine, both joined by rank or in units of their deviation.",
    measures=f"MRR@10 of {QUERIES} queries, and the paired difference to BM25 with its 95 % interval over files. "
    "Met if the interval of every seed is above 0.",
    evidence="training",
)
