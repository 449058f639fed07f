"""Normalisation: which likelihood of a choice ranks models as their held-out loss does?

    raw          log p(choice | prompt)
    tokens       the same per token
    characters   the same per character
    pmi          log p(choice | prompt) - log p(choice | "Answer:")

The models are checkpoints of training runs of several widths. Kendall's tau is the number of concordant pairs of
models (the one with the lower loss has the higher score) minus the number of discordant pairs, divided by all pairs; a
tie is neither. Its interval is a bootstrap over the files that the items are from. Resampling adds noise to the scores,
and noise lowers tau, so an interval may reach further down than up. The loss is not resampled.
"""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from bagu.data import DataConfig, evaluation_batches
from bagu.eval.choice import score_choices
from bagu.eval.intervals import estimate
from bagu.eval.score import item_scores
from bagu.eval.task import Item, Task, checked_items
from bagu.eval.tasks.continue4 import continue4
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, names_in, number, where
from bagu.lab.parts.confidence import known
from bagu.lab.parts.library_models import (
    CONTEXT,
    STEP_TOKENS,
    Library,
    new_model,
    next_line,
    on_engine,
    read_library,
    train,
)
from bagu.lab.plot import Line, Mark, Panel, Rule
from bagu.nn import Transformer
from bagu.train.cross_entropy import held_out_loss

NORMALIZATIONS = ("raw", "tokens", "characters", "pmi")
BY_LENGTH = ("tokens", "characters")
WIDTHS, CHECKPOINTS = (32, 64, 128), (60, 120, 250, 500)
CHARACTERS = 256  # the `max_len` of the tasks: prompts and choices of at most 140 and 102 characters
ITEMS, RESAMPLES = 300, 4000
NEGLIGIBLE = 0.1  # of Kendall's tau: a twentieth of the way from reversed to equal rankings
CHINESE = {
    "over raw": "与 raw 之差",
    " to ": " 至 ",
    "no better": "不更好",
    "not decided": "未定",
    "better": "更好",
    "worse": "更差",
}
CHANCE = 25.0  # percent: both tasks have four choices


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A model's loss, and per task and normalisation whether each item is answered correctly."""

    width: int
    parameters: int
    steps: int
    loss_nats: float
    correct: dict[str, dict[str, list[float]]]


def run(setting: Setting) -> list[Row]:
    library, quick = read_library(quick=setting.quick), setting.quick
    widths, checkpoints = ((32, 64), (1, 3)) if quick else (WIDTHS, CHECKPOINTS)
    tasks = [next_line(library.held), continue4(CHARACTERS, lambda: library.held)]
    items = {task.name: checked_items(task, limit=8 if quick else ITEMS) for task in tasks}

    @cache
    def trained(width: int) -> list[Transformer]:
        model = new_model(width=width, seed=1, device=setting.device)
        return train(model, library.train_tokens, steps=checkpoints[-1], seed=1, checkpoints=checkpoints)

    found = []
    for width, steps in setting.track(list(itertools.product(widths, checkpoints))):
        model = trained(width)[checkpoints.index(steps)]
        loss = held_out(model, library, batches=2 if quick else 20)
        correct = {task.name: answers(model, library, task, items[task.name]) for task in tasks}
        parameters = sum(p.numel() for p in model.parameters())
        found.append(Scored(width=width, parameters=parameters, steps=steps, loss_nats=loss, correct=correct))
    clusters = {name: [item.cluster for item in own] for name, own in items.items()}
    return [row for name in items for row in (*model_rows(found, name, clusters[name]), *ranks(found, name, clusters))]


def held_out(model: Transformer, library: Library, *, batches: int) -> float:
    """Nats per token on held-out modules."""
    shape = DataConfig(context=CONTEXT, rows=STEP_TOKENS // CONTEXT)
    model.eval()
    found = held_out_loss(partial(evaluation_batches, library.held_tokens, shape, limit=batches))(model)
    return float(found["val_loss_nats"] or 0.0)


def answers(model: Transformer, library: Library, task: Task, items: Sequence[Item]) -> dict[str, list[float]]:
    rows = score_choices(on_engine(model, library), replace(task, normalization="pmi"), items, "")
    return item_scores(task.kind, rows)


def model_rows(models: Sequence[Scored], task: str, clusters: Sequence[Hashable]) -> list[Row]:
    rows: list[Row] = []
    for model, name in itertools.product(models, NORMALIZATIONS):
        found = known(estimate(model.correct[task][name], clusters))
        rows.append(
            {
                "part": "model",
                "task": task,
                "normalization": name,
                "width": model.width,
                "parameters": model.parameters,
                "steps": model.steps,
                "tokens": model.steps * STEP_TOKENS,
                "loss_nats": model.loss_nats,
                "score_percent": 100 * found.mean,
                "low_percent": 100 * found.low,
                "high_percent": 100 * found.high,
            }
        )
    return rows


def ranks(models: Sequence[Scored], task: str, clusters: dict[str, list[str | None]]) -> list[Row]:
    """Kendall's tau of each normalisation, and its difference to that of `raw` on the same resampled files."""
    losses = np.array([model.loss_nats for model in models])
    own = clusters[task]
    names = list(dict.fromkeys(own))
    member = np.array([[cluster == name for name in names] for cluster in own], dtype=np.float64)  # [items, files]
    drawn = np.random.default_rng(0).multinomial(len(names), [1 / len(names)] * len(names), size=RESAMPLES)
    drawn = np.concatenate((np.ones((1, len(names))), drawn))  # the first row is the sample itself
    taus = {}
    for name in NORMALIZATIONS:
        correct = np.array([model.correct[task][name] for model in models])  # [models, items]
        taus[name] = kendall(drawn @ (correct @ member).T / (drawn @ member.sum(0))[:, None], losses)
    rows: list[Row] = []
    for name, tau in taus.items():
        better = tau - taus["raw"]
        rows.append(
            {
                "part": "rank",
                "task": task,
                "normalization": name,
                "models": len(models),
                "items": len(own),
                "files": len(names),
                "tau": float(tau[0]),
                "tau_low": float(np.quantile(tau[1:], 0.025)),
                "tau_high": float(np.quantile(tau[1:], 0.975)),
                "over_raw": float(better[0]),
                "over_raw_low": float(np.quantile(better[1:], 0.025)),
                "over_raw_high": float(np.quantile(better[1:], 0.975)),
            }
        )
    return rows


def kendall(scores: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """For each row of scores[B, models]: 1 if a lower loss always has a higher score, -1 if it has a lower one."""
    i, j = np.triu_indices(len(losses), 1)
    return np.mean(np.sign(scores[:, i] - scores[:, j]) * np.sign(losses[j] - losses[i]), axis=1)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if per token and per character rank better than raw on every task, by the interval of the difference; did
    not hold if neither does on any."""
    found = [row for row in rows if row["part"] == "rank"]
    decided_each = [decision(row) for row in found if row["normalization"] in BY_LENGTH]
    better = [d == "better" for d in decided_each]
    kind: Kind = "held" if all(better) else "holds only where" if any(better) else "did not hold"
    en, zh = [], []
    for task in dict.fromkeys(str(row["task"]) for row in found):
        own = [row for row in found if row["task"] == task]
        listed = [
            f"{row['normalization']} {number(row, 'tau'):.2f} "
            f"({number(row, 'tau_low'):.2f} to {number(row, 'tau_high'):.2f}"
            + ("" if row["normalization"] == "raw" else f"; over raw {difference(row)}: {decision(row)}")
            + ")"
            for row in own
        ]
        en.append(f"{task}: {', '.join(listed)}")
        zh.append(f"{task}：{translated('，'.join(listed))}")
    first = found[0]
    scores = [row for row in rows if row["part"] == "model"]
    above = sum(number(row, "low_percent") > CHANCE for row in scores)
    decided = Verdict(
        kind=kind,
        sentence_en=f"{above} of {len(scores)} scores are above chance; a ranking by the others is noise. "
        f"Kendall's tau between the held-out loss and the score of {first['models']} models, with 95 % "
        f"intervals. {'. '.join(en)}.",
        sentence_zh=f"{len(scores)} 个得分中有 {above} 个高于随机水平，其余的排名只是噪声。"
        f"{first['models']} 个模型的留出损失与得分之间的 Kendall τ，附 95 % 区间。{'。'.join(zh)}。",
    )
    if kind == "did not hold" and "not decided" in decided_each:
        return decided.undecided(
            "more items or models, until the interval of the difference leaves 0.",
            "更多题目或模型，直到差值的区间不再包含 0。",
        )
    return decided


def decision(row: Row) -> str:
    """A difference of less than NEGLIGIBLE is none."""
    low, high = number(row, "over_raw_low"), number(row, "over_raw_high")
    if low > 0:
        return "better"
    if high < 0:
        return "worse"
    return "no better" if high < NEGLIGIBLE else "not decided"


def translated(text: str) -> str:
    for english, chinese in CHINESE.items():
        text = text.replace(english, chinese)
    return text


def difference(row: Row) -> str:
    return f"{number(row, 'over_raw'):+.2f}, {number(row, 'over_raw_low'):+.2f} to {number(row, 'over_raw_high'):+.2f}"


def plot(rows: Sequence[Row]) -> list[Panel]:
    panels, tasks = [], names_in(rows, "task")
    taus: list[Mark] = [Rule(0)]
    for i, task in enumerate(tasks):
        lines: list[Mark] = [Rule(CHANCE)]
        for place, (name, marker) in enumerate(zip(NORMALIZATIONS, "os^D", strict=True)):
            own = where(rows, part="model", task=task, normalization=name)
            own = sorted(own, key=lambda r: number(r, "loss_nats"))
            lines.append(Line.of(own, "loss_nats", "score_percent", name, f"{marker}-", place))
            (rank,) = where(rows, part="rank", task=task, normalization=name)
            at, ends = place + 0.24 * (i - (len(tasks) - 1) / 2), (number(rank, "tau_low"), number(rank, "tau_high"))
            taus.append(Line([at], [number(rank, "tau")], task, "os"[i % 2], i, [ends]))
        losses = column(where(rows, part="model", task=task), "loss_nats")
        limits = (1.01 * max(losses), 0.99 * min(losses))  # a lower loss is further right
        panels.append(Panel(lines, task, "held-out loss, nats per token", "" if i else "score, %", xlim=limits))
    ranks = Panel(
        taus, "Agreement on the ranking", y="Kendall's tau with the loss", ylim=(-1.05, 1.05), xnames=NORMALIZATIONS
    )
    return [*panels, ranks]


LAB = Claim(
    title_en="Normalisation of choices",
    title_zh="选项得分的归一化",
    claim_en="Multiple-choice scores normalised by length rank models as their held-out loss does, better than raw "
    "likelihood.",
    claim_zh="按长度归一化的选择题得分给模型的排名更接近留出损失的排名，优于原始似然。",
    regime=f"Decoders of width {', '.join(map(str, WIDTHS))} with 2 layers, after {CHECKPOINTS[0] * STEP_TOKENS:,} to "
    f"{CHECKPOINTS[-1] * STEP_TOKENS:,} tokens of the standard library at a constant learning rate; up to {ITEMS} "
    "four-way items of next_line (wrong lines from other modules) and continue4 (from the same one), from held-out "
    "modules.",
    varies="Normalisation (raw, per token, per character, PMI), task, width and number of training tokens.",
    measures="Score of each model; Kendall's tau between score and held-out loss over all models, and its difference "
    "to that of raw, with a bootstrap over files.",
    evidence="model",
)
