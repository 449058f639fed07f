"""Contamination: how much do test items in the training text raise a score, and does the n-gram check find them?

    verbatim   copies of the question with its right answer
    edited     the same, with every eighth word replaced by another; each copy has other replacements
    control    items that are not in the training text

The items are divided by file into groups: one for each form and number of copies, and the control. Two models are
trained from the same weights for one epoch each, one on modules of the standard library alone, one on the same modules
and the copies of all groups. They are compared on the same items, so the difficulty of an item cancels.
"""

import itertools
import random
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bagu.data import Document
from bagu.data.split import place
from bagu.eval.choice import score_choices
from bagu.eval.contamination import WORDS, check_contamination
from bagu.eval.intervals import Estimate, compare, estimate
from bagu.eval.score import item_scores
from bagu.eval.task import Item, Task, checked_items
from bagu.eval.tasks.continue4 import continue4
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, number, where
from bagu.lab.parts.confidence import known
from bagu.lab.parts.library_models import STEP_TOKENS, Library, new_model, on_engine, read_library, sized, train
from bagu.lab.plot import Bars, Line, Mark, Panel, Rule

VERBATIM, EDITED, CONTROL = "verbatim", "edited", "control"
COPIES = (1, 4, 16)
LEVEL = 0.05  # a score rises if the paired test has a smaller p-value
EVERY = 8  # one word of so many is replaced: no run of 13 words stays whole
CHUNK, WIDTH = 1500, 64
TEXT, MOST, SEEDS = 600_000, 80, (1, 2, 3)  # characters of the library, items per group
CHARACTERS = 192  # the `max_len` of the task: prompts and choices of at most 105 and 76 characters
FOUND, WRONG = 90.0, 5.0  # percent: a group is found if at least FOUND of it and at most WRONG of the control is


@dataclass(frozen=True, kw_only=True)
class Group:
    form: str
    copies: int
    items: list[Item]

    def documents(self, task: Task, vocabulary: Sequence[str]) -> list[Document]:
        """Its copies in the training text."""
        found = []
        for item, copy in itertools.product(self.items, range(self.copies)):
            assert isinstance(item.answer, int)
            text = item.prompt + task.delimiter + item.choices[item.answer]
            if self.form == EDITED:
                text = edited(text, vocabulary, random.Random(f"{item.id}:{copy}"))
            found.append(Document(id=f"{item.id}:{copy}", text=text))
        return found


def groups(items: Sequence[Item], most: int) -> list[Group]:
    """Deal files to the groups in turn: items of one file stay together, so that no group learns from another."""
    cells = [(CONTROL, 0), *itertools.product((VERBATIM, EDITED), COPIES)]
    files = sorted({str(item.cluster) for item in items}, key=lambda name: place(name, seed=0, purpose="group"))
    cell_of = {name: i % len(cells) for i, name in enumerate(files)}
    return [
        Group(form=form, copies=copies, items=[item for item in items if cell_of[str(item.cluster)] == i][:most])
        for i, (form, copies) in enumerate(cells)
    ]


def edited(text: str, vocabulary: Sequence[str], rng: random.Random) -> str:
    """Replace every eighth word, at least one."""
    words = list(re.finditer(r"\w+", text))
    chosen = words[rng.randrange(min(EVERY, len(words))) :: EVERY] if words else []
    parts, end = [], 0
    for word in chosen:
        parts += [text[end : word.start()], rng.choice([w for w in rng.sample(vocabulary, 2) if w != word[0].lower()])]
        end = word.end()
    return "".join([*parts, text[end:]])


def chunks(modules: Iterable[Document], most: int) -> list[Document]:
    """Short documents, about `most` characters of text in all, so that the copies are spread evenly between them."""
    found: list[Document] = []
    for module in sorted(modules, key=lambda d: place(d.id, seed=0, purpose="train")):
        for at in range(0, len(module.text), CHUNK):
            if len(found) * CHUNK >= most:
                return found
            found.append(Document(id=f"{module.id}:{at}", text=module.text[at : at + CHUNK]))
    return found


def scores(
    library: Library, documents: Sequence[Document], task: Task, items: Sequence[Item], seed: int, device: str
) -> list[float]:
    """Train a model for one epoch of the documents and ask it all items."""
    model = new_model(width=WIDTH, seed=seed, device=device)
    train(model, library.store(documents), seed=seed, packing="stream")
    rows = score_choices(on_engine(model, library), task, items, "")
    return item_scores(task.kind, rows)[task.normalization]


def run(setting: Setting) -> list[Row]:
    library, quick = read_library(quick=setting.quick), setting.quick
    characters, most, seeds = (3_000, 2, (1,)) if quick else (TEXT, MOST, SEEDS)
    task = continue4(CHARACTERS, lambda: library.held)
    dealt = [group for group in groups(checked_items(task), most) if group.items]
    items = [item for group in dealt for item in group.items]
    text = chunks(library.train, characters)
    vocabulary = sorted({word for d in text for word in re.findall(r"[a-z_]{3,}", d.text)})
    planted = [*text, *(d for group in dealt for d in group.documents(task, vocabulary))]
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    for seed, with_copies in setting.track(list(itertools.product(seeds, found))):
        documents = planted if with_copies else text
        found[with_copies].append(scores(library, documents, task, items, seed, setting.device))
    clean, raised = (
        dict(zip((item.id for item in items), map(statistics.fmean, zip(*found[k], strict=True)), strict=True))
        for k in (False, True)
    )
    seen = set(check_contamination(items, (d.text for d in planted)).found)
    rows = [row(group, clean, raised, seen, len(seeds)) for group in dealt]
    steps = int(library.store(planted).lengths.sum()) // STEP_TOKENS
    return sized(rows, new_model(width=WIDTH, seed=1, device="cpu"), steps)


def row(group: Group, clean: dict[str, float], raised: dict[str, float], seen: set[str], seeds: int) -> Row:
    """The scores of both models on a group, as means over seeds."""
    clusters = [item.cluster for item in group.items]
    before, after = ([scores[item.id] for item in group.items] for scores in (clean, raised))
    rise = known(compare(before, after, clusters))
    return {
        "form": group.form,
        "copies": group.copies,
        "items": len(group.items),
        "files": rise.clusters,
        "seeds": seeds,
        **percent("clean", known(estimate(before, clusters))),
        **percent("contaminated", known(estimate(after, clusters))),
        "rise_points": 100 * rise.difference,
        "rise_low_points": 100 * rise.low,
        "rise_high_points": 100 * rise.high,
        "p_value": rise.p_value,
        "found_percent": 100 * statistics.fmean(item.id in seen for item in group.items),
    }


def percent(name: str, found: Estimate) -> Row:
    return {
        f"{name}_percent": 100 * found.mean,
        f"{name}_low_percent": 100 * found.low,
        f"{name}_high_percent": 100 * found.high,
    }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if some group's score rises and the check finds every such group; did not hold if it finds none of them."""
    control = next(r for r in rows if r["form"] == CONTROL)
    cells = [r for r in rows if r["form"] != CONTROL]
    rises = [r for r in cells if number(r, "rise_points") > 0 and number(r, "p_value") < LEVEL]
    specific = number(control, "found_percent") <= WRONG
    found = [r for r in rises if specific and number(r, "found_percent") >= FOUND]
    kind: Kind = "did not hold" if not found else "held" if found == rises else "holds only where"
    names = {VERBATIM: "逐字", EDITED: "改写"}
    en = [
        f"{r['form']} × {r['copies']} {change(r)} points (p = {number(r, 'p_value'):.2g}), "
        f"{number(r, 'found_percent'):.0f} % found"
        for r in cells
    ]
    zh = [
        f"{names[str(r['form'])]} × {r['copies']}：{change(r).replace(' to ', ' 至 ')} 个百分点"
        f"（p = {number(r, 'p_value'):.2g}），查出 {number(r, 'found_percent'):.0f} %"
        for r in cells
    ]
    raised, caught = (", ".join(f"{r['form']} × {r['copies']}" for r in own) or "none" for own in (rises, found))
    raised_zh, caught_zh = (
        "、".join(f"{names[str(r['form'])]} × {r['copies']}" for r in own) or "无" for own in (rises, found)
    )
    return Verdict(
        kind=kind,
        sentence_en=f"The score rises (p < {LEVEL}) with: {raised}. Of these the {WORDS}-gram check finds: {caught}. "
        f"Rise, and items found: {'; '.join(en)}. Control: {change(control)} points, "
        f"{number(control, 'found_percent'):.0f} % found, and a score of {number(control, 'clean_percent'):.0f} % "
        "without copies; chance is 25 %.",
        sentence_zh=f"使得分上升（p < {LEVEL}）的副本：{raised_zh}。其中 {WORDS}-gram 检查查出：{caught_zh}。"
        f"升幅与查出的题目：{'；'.join(zh)}。"
        f"对照组：{change(control).replace(' to ', ' 至 ')} 个百分点，查出 {number(control, 'found_percent'):.0f} %。"
        f"对照组的干净得分为 {number(control, 'clean_percent'):.0f} %，随机为 25 %。",
    )


def change(r: Row) -> str:
    low, high = number(r, "rise_low_points"), number(r, "rise_high_points")
    return f"{number(r, 'rise_points'):+.0f} ({low:+.0f} to {high:+.0f})"


def plot(rows: Sequence[Row]) -> list[Panel]:
    control = where(rows, form=CONTROL)[0]
    wrong, ends = number(control, "found_percent"), ("rise_low_points", "rise_high_points")
    low, high = (number(control, key) for key in ends)
    rises: list[Mark] = [
        Rule(low, upto=high, colour=2),
        Rule(number(control, "rise_points"), "control: not in the training text", colour=2),
        Rule(0, style="-"),
    ]
    found: list[Mark] = [Rule(wrong, colour=2)]
    for i, form in enumerate((VERBATIM, EDITED)):
        own = {int(number(r, "copies")): r for r in where(rows, form=form)}
        x = [COPIES.index(n) + 0.06 * (2 * i - 1) for n in own]
        spans = [(number(r, ends[0]), number(r, ends[1])) for r in own.values()]
        rises.append(Line(x, column([*own.values()], "rise_points"), form, "os"[i] + "-", i, spans))
        shares = [number(own[n], "found_percent") if n in own else None for n in COPIES]
        found.append(Bars(shares, form, i, text="{:.0f}"))
    copies, what = "copies in the training text", f"Found by the {WORDS}-gram check (control: {wrong:.0f} %)"
    names = [str(n) for n in COPIES]
    return [
        Panel(rises, "Rise of the score, with 95 % intervals", copies, "points", xnames=names, legend="below"),
        Panel(found, what, copies, "items found, %", ylim=(0, 112), xnames=names, legend="below"),
    ]


LAB = Claim(
    title_en="Contamination",
    title_zh="测试集污染",
    claim_en="Test items in the training text raise the score, and an n-gram check finds them.",
    claim_zh="训练文本中混入测试题会抬高得分，而 n-gram 检查能把它们查出来。",
    regime=f"A decoder of width {WIDTH} with 2 layers, trained for one epoch on {TEXT:,} characters of the standard "
    f"library and all copies; four-way items of continue4 from held-out modules, up to {MOST} per group.",
    varies=f"Form of the copies (verbatim; every {EVERY}th word replaced), their number "
    f"({', '.join(map(str, COPIES))}), seed ({len(SEEDS)}, averaged per item).",
    measures="Paired difference of the score between a model trained with and one trained without the copies, with a "
    f"bootstrap interval over files and a p-value; percentage of items that the {WORDS}-gram check finds; the same for "
    "a control group.",
    evidence="training",
)
