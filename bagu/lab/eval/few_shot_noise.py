"""Few-shot noise: how much a score changes with the examples in the prompt and with their order.

    spread     half the range of 95 % of the scores with other examples, or another order: 1.96 standard deviations
    interval   half the width of the 95 % interval that `bagu eval` reports for one score, which covers the choice of
               the questions only

The model and the questions stay the same. Examples come from items that are not asked.
"""

from __future__ import annotations

import itertools
import random
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bagu.eval.choice import score_choices
from bagu.eval.intervals import compare, estimate
from bagu.eval.score import item_scores
from bagu.eval.task import Item, Task, checked_items
from bagu.eval.tasks.library import in_fair_order
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
    sized,
    train,
)
from bagu.lab.plot import INK, Band, Line, Mark, Panel, Rule
from bagu.recipes.eval_models import EngineModel

WORDS = ("return", "else", "except", "def")  # indentation and the line before decide which
BEFORE, PER_FILE = 100, 3  # characters before a keyword, items of a file and keyword at most
SHOTS = (1, 4)
STEPS, WIDTH, DRAWS = 1000, 128, 12
EXAMPLES, ORDER = "examples", "order"
LEVEL = 0.05  # of a paired test
CHANCE = 25.0  # percent: all tasks have four choices


def keyword(library: Library) -> Task:
    """Which keyword begins the next line: the same four choices for every item, and as many items of each."""

    def items() -> Iterator[Item]:
        for module in library.held:
            lines = module.text.split("\n")
            for answer, word in enumerate(WORDS):
                places = [i for i in range(8, len(lines)) if re.match(rf" +{word}\b", lines[i])]
                rng = random.Random(f"{module.id}:{word}")
                for at in rng.sample(places, min(PER_FILE, len(places))):
                    before = "\n".join(lines[:at])[-BEFORE:]
                    indent = lines[at][: -len(lines[at].lstrip())]
                    if before.isascii():
                        yield Item(
                            id=f"{module.id}:{at + 1}",
                            prompt=before[before.find("\n") + 1 :],
                            answer=answer,
                            choices=tuple(indent + w for w in WORDS),
                            cluster=module.id,
                        )

    def balanced() -> list[Item]:
        found = in_fair_order(items())
        by_answer = [[item for item in found if item.answer == answer] for answer in range(len(WORDS))]
        return [item for group in zip(*by_answer, strict=False) for item in group]

    return Task(name="keyword", kind="choice", items=balanced, delimiter="\n", limits="Four keywords. Chance is 25 %.")


@dataclass(frozen=True, kw_only=True)
class Questions:
    """A task, the items that are asked, and those that serve as examples."""

    task: Task
    choices: str  # what the choices are
    asked: list[Item]
    pool: list[Item]

    @classmethod
    def make(cls, model: EngineModel, task: Task, choices: str, most: int) -> Questions:
        """At most a quarter of the items are examples; they are short enough for the model's context."""
        items = checked_items(task)
        asked = items[: min(most, len(items) * 3 // 4)]
        question = max(
            len(model.encode(item.prompt + task.delimiter + choice)) for item in asked for choice in item.choices
        )
        room = (model.max_len - question) // max(SHOTS) - 2  # 2: the blank line between examples
        rest = items[len(asked) :]
        pool = [item for item in rest if len(model.encode(example(task, item))) <= room]
        return cls(task=task, choices=choices, asked=asked, pool=pool)

    def correct(self, model: EngineModel, prefix: str) -> list[float]:
        """1 for each item that the model answers correctly after the examples in `prefix`, else 0."""
        rows = score_choices(model, self.task, self.asked, prefix)
        return item_scores(self.task.kind, rows)[self.task.normalization]

    def prefix(self, examples: Sequence[Item]) -> str:
        return "\n\n".join([*(example(self.task, item) for item in examples), ""]) if examples else ""

    def prefixes(self, shots: int, moved: str, draws: int) -> list[str]:
        """`draws` prompts that differ in their examples, or in the order of one set of examples."""
        if moved == EXAMPLES:
            return [self.prefix(random.Random(f"{shots}:{draw}").sample(self.pool, shots)) for draw in range(draws)]
        chosen = random.Random(f"{shots}:0").sample(self.pool, shots)
        orders = list(itertools.permutations(chosen))
        return [self.prefix(order) for order in random.Random(0).sample(orders, min(draws, len(orders)))]


def example(task: Task, item: Item) -> str:
    assert isinstance(item.answer, int)
    return item.prompt + task.delimiter + item.choices[item.answer]


def run(setting: Setting) -> list[Row]:
    library, quick = read_library(quick=setting.quick), setting.quick
    draws, sizes, steps, width = (2, (6, 12), 4, 32) if quick else (DRAWS, (40, 80, 160), STEPS, WIDTH)
    model = new_model(width=width, seed=1, device=setting.device)
    train(model, library.train_tokens, steps=steps, seed=1)
    asked = on_engine(model, library)
    tasks = (
        Questions.make(asked, next_line(library.held), "texts", sizes[-1]),
        Questions.make(asked, keyword(library), "labels", sizes[-1]),
    )
    cases = [(shots, EXAMPLES) for shots in SHOTS] + [(max(SHOTS), ORDER)]
    points = [
        (q, shots, moved, prefix)
        for q in tasks
        for shots, moved in [(0, ""), *cases]
        for prefix in (q.prefixes(shots, moved, draws) if shots else [""])
    ]
    found: dict[tuple[str, int, str], list[list[float]]] = {}
    for q, shots, moved, prefix in setting.track(points):
        found.setdefault((q.task.name, shots, moved), []).append(q.correct(asked, prefix))
    rows: list[Row] = []
    for q, (shots, moved) in itertools.product(tasks, cases):
        scores, zero = found[q.task.name, shots, moved], found[q.task.name, 0, ""][0]
        rows += [spread(q, shots, moved, scores, n) for n in sorted({min(n, len(q.asked)) for n in sizes})]
        rows += [score(q, shots, moved, draw, values, zero) for draw, values in enumerate(scores)]
    return sized(rows, model, steps)


def score(q: Questions, shots: int, moved: str, draw: int, values: Sequence[float], zero: Sequence[float]) -> Row:
    """One score as `bagu eval` reports it."""
    found = known(estimate(values, [item.cluster for item in q.asked]))
    return {
        "part": "score",
        "task": q.task.name,
        "shots": shots,
        "moved": moved,
        "draw": draw,
        "items": found.items,
        "score_percent": 100 * found.mean,
        "low_percent": 100 * found.low,
        "high_percent": 100 * found.high,
        "zero_shot_percent": 100 * statistics.fmean(zero),
    }


def spread(q: Questions, shots: int, moved: str, scores: Sequence[Sequence[float]], n: int) -> Row:
    """All draws on the first `n` items."""
    clusters, first = [item.cluster for item in q.asked[:n]], [values[:n] for values in scores]
    estimates = [known(estimate(values, clusters)) for values in first]
    means = [e.mean for e in estimates]
    pairs = list(itertools.combinations(first, 2))
    spread, interval = 1.96 * statistics.stdev(means), statistics.fmean((e.high - e.low) / 2 for e in estimates)
    return {
        "part": "spread",
        "task": q.task.name,
        "choices": q.choices,
        "shots": shots,
        "moved": moved,
        "draws": len(scores),
        "items": n,
        "score_percent": 100 * statistics.fmean(means),
        "lowest_percent": 100 * min(means),
        "highest_percent": 100 * max(means),
        "spread_points": 100 * spread,
        "interval_points": 100 * interval,
        "changed_items_percent": 100 * statistics.fmean(x != y for a, b in pairs for x, y in zip(a, b, strict=True)),
        "significant_pairs_percent": 100 * statistics.fmean(compare(a, b, clusters).p_value < LEVEL for a, b in pairs),
    }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if in every case the spread is at most the interval; decided on the largest number of items.

    A case whose score is not above chance does not support the claim: a guess hardly depends on the examples.
    """
    cases = largest(rows)
    able = [number(row, "score_percent") - number(row, "interval_points") > CHANCE for row in cases]
    inside = [
        number(row, "spread_points") <= number(row, "interval_points") and above
        for row, above in zip(cases, able, strict=True)
    ]
    kind: Kind = "held" if all(inside) else "holds only where" if any(inside) else "did not hold"
    weak = len(able) - sum(able)
    en = [
        f"{row['task']} ({row['choices']}), {row['shots']}-shot, other {row['moved']}: scores of "
        f"{number(row, 'lowest_percent'):.0f} to {number(row, 'highest_percent'):.0f} % in {row['draws']} draws, "
        f"±{number(row, 'spread_points'):.1f} points against an interval of ±{number(row, 'interval_points'):.1f}, "
        f"and a paired test finds {number(row, 'significant_pairs_percent'):.0f} % of the pairs different"
        for row in cases
    ]
    names = {EXAMPLES: "换示例", ORDER: "换顺序", "texts": "整段文本", "labels": "固定标签"}
    zh = [
        f"{row['task']}（选项为{names[str(row['choices'])]}），{row['shots']}-shot，{names[str(row['moved'])]}："
        f"{row['draws']} 次得分在 {number(row, 'lowest_percent'):.0f} 至 {number(row, 'highest_percent'):.0f} % 之间，"
        f"即 ±{number(row, 'spread_points'):.1f} 个百分点，而区间为 ±{number(row, 'interval_points'):.1f}，"
        f"配对检验认为 {number(row, 'significant_pairs_percent'):.0f} % 的组合有差异"
        for row in cases
    ]
    items = {str(row["task"]): row["items"] for row in cases}
    asked = " and ".join(dict.fromkeys(f"{n}" for n in items.values()))
    decided = Verdict(
        kind=kind,
        sentence_en=f"With {asked} items; {weak} of {len(able)} cases are at chance and decide nothing. "
        f"{'; '.join(en)}.",
        sentence_zh=f"共 {asked.replace(' and ', ' 和 ')} 题；{len(able)} 种情形中有 {weak} 种处于随机水平，"
        f"不能说明问题。{'；'.join(zh)}。",
    )
    if not any(able):
        return decided.undecided(
            "a model that answers above chance: more training, or an easier task.",
            "需要得分高于随机的模型：训练更久，或换更容易的任务。",
        )
    return decided


def largest(rows: Sequence[Row]) -> list[Row]:
    """The spread of each case on the largest number of items."""
    found: dict[tuple[object, ...], Row] = {}
    for row in sorted((r for r in rows if r["part"] == "spread"), key=lambda r: number(r, "items")):
        found[row["task"], row["shots"], row["moved"]] = row
    return list(found.values())


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Every score as a dot on the interval around the mean; and the spread relative to the interval, by items."""
    cases, spreads = largest(rows), where(rows, part="spread")
    tasks, names = names_in(cases, "task"), []
    marks: list[Mark] = [Rule(CHANCE, "chance")]
    for at, case in enumerate(cases):
        own = where(rows, part="score", **{k: case[k] for k in ("task", "shots", "moved")})
        colour, mean, half = (
            tasks.index(str(case["task"])),
            number(case, "score_percent"),
            number(case, "interval_points"),
        )
        x = [at + 0.5 * ((i + 0.5) / len(own) - 0.5) for i in range(len(own))]
        zero, ends = number(own[0], "zero_shot_percent"), [at - 0.35, at + 0.35]
        marks += [
            Band(ends, [mean - half] * 2, [mean + half] * 2, colour),
            Line(x, column(own, "score_percent"), "one draw", "o", colour),
            Line(ends, [zero, zero], "zero-shot", "--", INK),
        ]
        names.append(f"{case['task']}\n{case['shots']}-shot\n{case['moved']}")
    lines: list[Mark] = [Rule(100, style="-")]
    for task, shots, moved in dict.fromkeys((r["task"], r["shots"], r["moved"]) for r in spreads):
        some = [r for r in where(spreads, task=task, shots=shots, moved=moved) if r["interval_points"]]
        style, alpha = "o-" if moved == EXAMPLES else "s:", 0.5 if shots == min(SHOTS) else 1.0
        label, colour = f"{task}, {shots}-shot, {moved}", tasks.index(str(task))
        lines.append(Line.of(some, "items", relative_spread, label, style, colour, alpha=alpha))
    title = "Other examples, and another order (shaded: interval of one score)"
    return [
        Panel(marks, title, y="score, %", xnames=names, width=1.5, legend="below"),
        Panel(lines, "Against the interval", "items", "spread, % of the interval", ylim=(0, None)),
    ]


def relative_spread(row: Row) -> float:
    return 100 * number(row, "spread_points") / number(row, "interval_points")


LAB = Claim(
    title_en="Few-shot noise",
    title_zh="少样本评测的噪声",
    claim_en="The choice and the order of few-shot examples change a score by less than its 95 % interval.",
    claim_zh="少样本示例的选取与顺序对得分的影响小于得分的 95 % 置信区间。",
    regime=f"A decoder of width {WIDTH} with 2 layers, trained on {STEPS * STEP_TOKENS:,} tokens of the standard "
    f"library; context {CONTEXT}. Two tasks on held-out modules: next_line (which of four lines follows, by the "
    "likelihood per character) and keyword (which of four keywords begins the next line: the same choices for every "
    "item).",
    varies=f"The examples ({DRAWS} draws, {' or '.join(map(str, SHOTS))} of them), the order of {max(SHOTS)} of them "
    f"({DRAWS} orders), the number of items.",
    measures="1.96 standard deviations of the score over draws, against half the width of the bootstrap interval over "
    f"files of one score; the percentage of pairs of draws that a paired test calls different (p < {LEVEL}).",
    evidence="model",
)
