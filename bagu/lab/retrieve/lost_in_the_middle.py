"""Lost in the middle: right answers by the place of the fact, after training on questions about any place or the ends.

The length is that of the training, so that neither unseen positions nor more facts explain a loss.
"""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from statistics import fmean

import torch

from bagu.lab.core import (
    Claim,
    Row,
    Setting,
    Text,
    Verdict,
    column,
    listed,
    names_in,
    number,
    numbers_in,
    say,
    share_met,
    where,
)
from bagu.lab.parts.confidence import interval
from bagu.lab.parts.facts import ASK, FACTS, QUESTIONS, SAY, VALUES, passages, reader
from bagu.lab.parts.more_steps import IGNORE, right, train_on_draws
from bagu.lab.plot import Line, Panel, Rule

PASSAGES, SHORT = 8, 2  # of the texts, and of those from which reading is learned first
ENDS = 2  # passages at each end
LESS = 5.0  # points
TRAININGS = {"any place": "任何位置", "ends": "两端"}


def asked(generator: torch.Generator, places: Sequence[int], rows: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of PASSAGES passages with questions about facts in the passages at `places`."""
    draw = random.Random(int(torch.randint(1 << 30, (), generator=generator)))
    ids, targets = [], []
    for _ in range(rows):
        found, values = passages(PASSAGES, draw)
        keys = [t // VALUES for place in places for t in found[place] if t < ASK]
        chosen = draw.choices(keys, k=QUESTIONS)
        ids.append([t for p in found for t in p] + [ASK + key for key in chosen])
        targets.append([IGNORE] * (len(ids[-1]) - QUESTIONS) + [SAY + values[key] for key in chosen])
    return torch.tensor(ids), torch.tensor(targets)


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    seeds, steps, rows = ((1, 2), 2, 4) if quick else ((1, 2, 3), 500, 128)
    every = list(range(PASSAGES))
    ends = [*every[:ENDS], *every[-ENDS:]]
    for seed, training in setting.track(list(product(seeds, TRAININGS))):
        model = reader(most=SHORT, steps=steps, seed=seed, device=setting.device)
        draw = partial(asked, places=every if training == "any place" else ends)
        train_on_draws(model, draw, steps=steps, seed=seed, lr=4e-3)
        for place in every:
            ids, targets = (x.to(setting.device) for x in asked(torch.Generator().manual_seed(place), [place], rows))
            share = right(model, ids, targets)[:, -QUESTIONS:].mean().item()
            yield {
                "training": training,
                "seed": seed,
                "place": place + 1,
                "steps": steps,
                "right_percent": 100 * share,
                "parameters": sum(p.numel() for p in model.parameters()),
            }


def ends_and_middle(rows: Sequence[Row], training: str) -> tuple[tuple[float, float], float]:
    """The mean of the first and the last passage, and of the two in the middle, in percent; the half width of the
    difference."""
    differences, means = [], []
    for seed in numbers_in(rows, "seed"):
        own = where(rows, training=training, seed=int(seed))
        at = {int(number(r, "place")): number(r, "right_percent") for r in own}
        outer, inner = (at[1] + at[PASSAGES]) / 2, (at[PASSAGES // 2] + at[PASSAGES // 2 + 1]) / 2
        means.append((outer, inner))
        differences.append(outer - inner)
    return (fmean(a for a, _ in means), fmean(b for _, b in means)), interval(differences)[1]


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the middle is lower by LESS points after both trainings."""
    found = {t: ends_and_middle(rows, t) for t in names_in(rows, "training")}
    told = [
        say(
            "trained on questions about {training}: ends {a:.0f} %, middle {b:.0f} % (± {half:.0f})",
            "训练时问{training}：两端 {a:.0f} %，中间 {b:.0f} %（± {half:.0f}）",
            training=Text(t if t != "ends" else "the ends", TRAININGS[t]),
            a=outer,
            b=inner,
            half=half,
        )
        for t, ((outer, inner), half) in found.items()
    ]
    said = Verdict.say(
        share_met(outer - inner - half > LESS for (outer, inner), half in found.values()),
        "Right answers. {told}.",
        "答对的比例。{told}。",
        told=listed(told, "; ", "；"),
    )
    unclear = [t for t, ((a, b), half) in found.items() if a - b - half <= LESS < a - b + half]
    if not unclear and max(column(rows, "right_percent")) > 200 / VALUES:
        return said
    return said.undecided(
        f"models that read, and more seeds, until the differences are on one side of {LESS:g} points.",
        f"能读懂的模型与更多种子，直到差值落在 {LESS:g} 个百分点的一侧。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    places = numbers_in(rows, "place")
    lines = [
        Line(
            places,
            [fmean(column(where(rows, training=t, place=int(p)), "right_percent")) for p in places],
            f"trained on {t}",
        )
        for t in names_in(rows, "training")
    ]
    marks = [*lines, Rule(100 / VALUES, "chance")]
    return [Panel(marks, "Where the answer stands", "passage", "right answers, %", ylim=(0, 105))]


LAB = Claim(
    title_en="Lost in the middle",
    title_zh="迷失在中间",
    claim_en="What stands in the middle of a context is found less often than what stands at its ends.",
    claim_zh="处在上下文中间的内容比两端更难被用到。",
    regime=f"A model of 2 layers, width 64, that reads texts of up to {SHORT} passages, trained on texts of {PASSAGES} "
    f"passages of {2 * FACTS} tokens with questions at the end, evaluated at the same length; 3 seeds.",
    varies=f"The passage with the answer; the training: questions about any passage, or about the {ENDS} at each end.",
    measures=f"Right answers by place; the middle is lost if it is {LESS:g} points below the mean of the ends, with "
    "its 95 % interval.",
    evidence="training",
    published_en="GPT-3.5 and others answer best when the document is at the beginning or the end of 20 or 30, and "
    "worse in the middle (Liu et al. 2023, arXiv:2307.03172).",
    published_zh="在 20 或 30 篇文档中，答案所在的一篇在开头或结尾时 GPT-3.5 等模型答得最好，在中间时变差"
    "（Liu 等，2023，arXiv:2307.03172）。",
)
