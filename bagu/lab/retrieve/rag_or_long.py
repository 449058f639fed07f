"""Retrieve, or read everything: answers, tokens read and prefill time over a growing pile of passages.

none       the question alone
retrieved  the two best passages by BM25
all        every passage in the context
right      the passage that has the answer, as a bound
"""

import random
import time
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import fmean

from bagu.lab.core import Claim, Row, Setting, Verdict, column, listed, numbers_in, say, share_met, where
from bagu.lab.parts.confidence import interval
from bagu.lab.parts.facts import VALUES, Index, answered, passages, reader
from bagu.lab.plot import Line, Panel, Rule
from bagu.nn import Transformer

TRAINED = 4  # the most passages in training
PILES = (2, 4, 8, 12)
TOP = 2
MARGIN = 2.0  # points
WAYS = ("none", "retrieved", "all", "right")


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    piles, seeds, steps, asked = (PILES[:2], (1, 2), 2, 4) if quick else (PILES, (1, 2, 3), 900, 300)
    models: dict[int, Transformer] = {}
    for seed, pile in setting.track(list(product(seeds, piles))):
        if seed not in models:
            models[seed] = reader(most=TRAINED, steps=steps, seed=seed, device=setting.device)
        for way, row in measured(models[seed], pile, asked).items():
            yield {
                "way": way,
                "passages": pile,
                "seed": seed,
                "steps": steps,
                **row,
                "parameters": sum(p.numel() for p in models[seed].parameters()),
            }


def measured(model: Transformer, pile: int, asked: int) -> dict[str, Row]:
    draw = random.Random(pile)
    contexts: dict[str, list[list[int]]] = {way: [] for way in WAYS}
    keys, answers, hits = [], [], []
    for _ in range(asked):
        found, values = passages(pile, draw)
        key = draw.choice(list(values))
        holds = next(i for i, p in enumerate(found) if key * VALUES + values[key] in p)
        best = Index(found).best(key, TOP)
        hits.append(float(holds in best))
        chosen = {"none": [], "retrieved": best, "all": range(pile), "right": [holds]}
        for way, numbers in chosen.items():
            contexts[way].append([t for i in numbers for t in found[i]])
        keys.append(key)
        answers.append(values[key])
    rows: dict[str, Row] = {}
    answered(model, contexts["all"][:2], keys[:2], answers[:2])  # the first calls take longer
    for way in WAYS:
        began = time.process_time()
        share = fmean(answered(model, contexts[way], keys, answers))
        took = time.process_time() - began
        rows[way] = {
            "right_percent": 100 * share,
            "tokens": fmean(map(len, contexts[way])),
            "time_ms": 1e3 * took / asked,
            "found_percent": 100 * fmean(hits) if way == "retrieved" else None,
        }
    return rows


def lead(rows: Sequence[Row], pile: float) -> tuple[float, float]:
    """Points by which retrieval is above reading everything, over seeds."""
    retrieved, everything = (
        column(where(rows, way=way, passages=pile), "right_percent") for way in ("retrieved", "all")
    )
    return interval([a - b for a, b in zip(retrieved, everything, strict=True)])


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if retrieval answers as well as reading everything (within the margin) at every size of the pile."""
    piles = [int(p) for p in numbers_in(rows, "passages")]
    leads = {p: lead(rows, p) for p in piles}
    told = [
        say(
            "{p} passages: retrieved {a:.0f} % ({found:.0f} % found), all {b:.0f} %, right one {c:.0f} %",
            "{p} 段：检索 {a:.0f} %（找到 {found:.0f} %），全部 {b:.0f} %，正确的一段 {c:.0f} %",
            p=p,
            found=fmean(column(where(rows, way="retrieved", passages=p), "found_percent")),
            **{
                k: fmean(column(where(rows, way=way, passages=p), "right_percent"))
                for k, way in (("a", "retrieved"), ("b", "all"), ("c", "right"))
            },
        )
        for p in piles
    ]
    said = Verdict.say(
        share_met(mean + MARGIN >= 0 for mean, _ in leads.values()),
        "Right answers, trained on up to {trained} passages. {told}.",
        "答对的比例；训练时至多 {trained} 段。{told}。",
        trained=TRAINED,
        told=listed(told, "; ", "；"),
    )
    if max(column(where(rows, way="right"), "right_percent")) > 2 * 100 / VALUES:
        return said
    return said.undecided(
        "a model that can read: even the right passage gives chance.", "能读懂的模型：给出正确的一段也只有随机水平。"
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    piles = numbers_in(rows, "passages")

    def lines(key: str) -> list[Line]:
        return [Line(piles, [fmean(column(where(rows, way=way, passages=p), key)) for p in piles], way) for way in WAYS]

    x = "passages in the pile"
    return [
        Panel([Rule(TRAINED, "longest in training", axis="x"), *lines("right_percent")], "Right answers", x, "%"),
        Panel(lines("tokens"), "Read", x, "tokens"),
        Panel(lines("time_ms"), "Time of an answer", x, "CPU time, ms", ylim=(0, None)),
    ]


LAB = Claim(
    title_en="Retrieve or read everything",
    title_zh="检索还是全部读完",
    claim_en="Where the context is too short retrieval is the usual answer: what is found serves as well as the whole.",
    claim_zh="上下文不够长时，通常用检索：找到的部分与全文一样有用。",
    regime=f"A model of 2 layers, width 64, that has learned to answer questions about facts in up to {TRAINED} "
    "passages of six tokens; BM25 over the names of the facts; 3 seeds.",
    varies=f"The pile ({PILES[0]} to {PILES[-1]} passages, three facts each); the context: none, the {TOP} best "
    "passages, all, the right one.",
    measures=f"Right answers of 300 questions, tokens, CPU time. Retrieval serves as well if it is at most {MARGIN:g} "
    "points below everything.",
    evidence="training",
    published_en="Long context answered 56.3 % of 13,628 questions and retrieval 49.0 %; 1,294 were right with "
    "retrieval only (Li et al. 2025, as reported by swarmsignal.net).",
    published_zh="13,628 个问题中长上下文答对 56.3 %，检索答对 49.0 %；有 1,294 个只有检索答对（Li 等，2025，据 "
    "swarmsignal.net）。",
)
