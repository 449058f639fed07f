"""New facts by fine-tuning or by retrieval: answers, steps, and what the model can no longer do.

tuned       trained on the questions and answers of the new facts, without a context
retrieved   the untouched model with the two best passages by BM25
reading     answers from a context that says something else than the new facts: whether it still reads
"""

import copy
import random
from collections.abc import Iterator, Sequence
from statistics import fmean

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, column, numbers_in, share_met, where
from bagu.lab.parts.facts import ASK, KEYS, SAY, VALUES, Index, answered, passages, reader
from bagu.lab.parts.more_steps import train_on_draws
from bagu.lab.plot import Line, Panel, Rule
from bagu.nn import Transformer

TRAINED, PILE, TOP = 4, 12, 2  # passages: the most in training, of the new facts, retrieved
STEPS = (10, 30, 100, 300)
KEPT = 5.0  # points of reading that may be lost


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    seeds, steps, more, asked = ((1, 2), 2, STEPS[:1], 6) if quick else ((1, 2, 3), 900, STEPS, 150)
    for seed in setting.track(seeds):
        model = reader(most=TRAINED, steps=steps, seed=seed, device=setting.device)
        found, values = passages(PILE, random.Random(seed))
        keys, size = list(values)[:asked], {"parameters": sum(p.numel() for p in model.parameters())}
        index = Index(found)
        contexts = [[t for i in index.best(key, TOP) for t in found[i]] for key in keys]
        yield {
            "way": "retrieved",
            "seed": seed,
            "steps": 0,
            **size,
            "reading_percent": reading(model, asked),
            "new_percent": 100 * fmean(answered(model, contexts, keys, [values[k] for k in keys])),
        }
        for count in more:
            tuned = tune(copy.deepcopy(model), values, count, seed)
            new_facts = answered(tuned, [[]] * len(keys), keys, [values[k] for k in keys])
            yield {
                "way": "tuned",
                "seed": seed,
                "steps": count,
                **size,
                "new_percent": 100 * fmean(new_facts),
                "reading_percent": reading(tuned, asked),
            }


def tune(model: Transformer, values: dict[int, int], steps: int, seed: int) -> Transformer:
    """Train on questions without a context."""
    keys = torch.tensor(sorted(values))

    def draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = keys[torch.randint(len(keys), (64, 1), generator=generator)]
        return ASK + chosen, SAY + torch.tensor([[values[int(k)]] for k in chosen])

    return train_on_draws(model, draw, steps=steps, seed=seed, lr=1e-3)


def reading(model: Transformer, asked: int) -> float:
    """Right answers in percent from contexts of other facts about the same keys."""
    draw, contexts, keys, answers = random.Random(7), [], [], []
    for _ in range(asked):
        found, values = passages(TRAINED, draw)
        key = draw.choice(list(values))
        contexts.append([t for p in found for t in p])
        keys.append(key)
        answers.append(values[key])
    return 100 * fmean(answered(model, contexts, keys, answers))


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if tuning, where it knows the new facts as well as retrieval does, has lost more than KEPT points of
    reading, or never knows them as well; did not hold if it knows them and still reads."""
    retrieved = where(rows, way="retrieved")
    known, read = (fmean(column(retrieved, key)) for key in ("new_percent", "reading_percent"))
    tuned = {
        int(s): [fmean(column(where(rows, way="tuned", steps=int(s)), k)) for k in ("new_percent", "reading_percent")]
        for s in numbers_in(where(rows, way="tuned"), "steps")
    }
    enough = [s for s, (new, _) in tuned.items() if new >= known]
    last = max(tuned)
    steps = enough[0] if enough else last
    said = Verdict.say(
        share_met([not enough, read - tuned[steps][1] > KEPT] if enough else [True]),
        "Retrieval answers {known:.0f} % of the new facts without a step and reads {read:.0f} % of other contexts. "
        "Tuning answers {new:.0f} % after {steps} steps and then reads {left:.0f} %.",
        "检索不训练就答对新事实的 {known:.0f} %，读其他上下文答对 {read:.0f} %。微调 {steps} 步后答对 {new:.0f} %，"
        "此时读上下文答对 {left:.0f} %。",
        known=known,
        read=read,
        new=tuned[steps][0],
        steps=steps,
        left=tuned[steps][1],
    )
    if read > 200 / VALUES:
        return said
    return said.undecided("a model that can read: it is near chance.", "能读懂的模型：现在接近随机水平。")


def plot(rows: Sequence[Row]) -> list[Panel]:
    steps = numbers_in(where(rows, way="tuned"), "steps")
    panels = []
    for key, title in (("new_percent", "New facts"), ("reading_percent", "Reading other contexts")):
        line = Line(steps, [fmean(column(where(rows, way="tuned", steps=int(s)), key)) for s in steps], "tuned")
        rule = Rule(fmean(column(where(rows, way="retrieved"), key)), "retrieved")
        marks = [line, rule, Rule(100 / VALUES, "chance", colour=3)]
        panels.append(Panel(marks, title, "steps of tuning", "right answers, %", xscale="log", ylim=(0, 105)))
    return panels


LAB = Claim(
    title_en="Fine-tune or retrieve",
    title_zh="微调还是检索",
    claim_en="New facts belong into the context, not into the weights: tuning learns them slowly and forgets others.",
    claim_zh="新事实应放进上下文而不是权重：微调学得慢，还会遗忘。",
    regime=f"A model of 2 layers, width 64, that has learned to answer from up to {TRAINED} passages; {PILE} passages "
    f"of new facts about {KEYS} keys; 3 seeds.",
    varies=f"Retrieval of the {TOP} best passages, or {STEPS[0]} to {STEPS[-1]} steps of training on the questions and "
    "answers alone.",
    measures=f"Right answers about the new facts, and from contexts that say something else; more than {KEPT:g} points "
    "less of these counts as forgotten.",
    evidence="training",
    published_en="Over knowledge tasks retrieval beat unsupervised fine-tuning for facts seen in pretraining and for "
    "new ones (Ovadia et al. 2023, arXiv:2312.05934).",
    published_zh="在知识任务上，无论事实是否出现在预训练中，检索都优于无监督微调（Ovadia 等，2023，arXiv:2312.05934）"
    "。",
)
