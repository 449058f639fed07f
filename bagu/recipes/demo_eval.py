"""The evaluation of a demo: built-in tasks, scored after each stage of training on the same items.

`compose` is the score of post-training: sampled functions that return the right values, of verbs in an order that no
training item has; `compose_long` has more verbs than any. A longer demo adds the tasks of the standard library. The
diversity of the answers to `write` is shown beside its score, because one text repeated under each name could score as
high.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from bagu.data.chat import ChatEncoder
from bagu.data.tokenizer import BpeTokenizer
from bagu.eval.compare import compare_folders, read_side
from bagu.eval.diversity import Diversity, diversity
from bagu.eval.intervals import Comparison, Estimate
from bagu.eval.model import Decoding
from bagu.eval.score import Result, evaluate
from bagu.eval.tasks import built_in
from bagu.eval.tasks.compose import COMPOSE, LONG
from bagu.eval.words import PERCENT, p_value
from bagu.nn.change import evaluating
from bagu.nn.model import Transformer
from bagu.recipes.demo_sizes import Demo
from bagu.recipes.eval_models import EngineModel, eval_engine
from bagu.runs.display import Table
from bagu.serve.request import Sampling

WRITE = "write"
TASKS = (COMPOSE, LONG)
LIBRARY_TASKS = ("continue4", "signature", WRITE)
SCALE = replace(PERCENT, digits=0)  # the intervals of a demo are wide
ASKED_AGAIN = 24  # questions that may be suggested
KV_MEMORY = 64 << 20  # bytes: the models are small


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results after one stage, and the folder that holds every item. `variety` is of the answers to `write`, None
    if it was not asked; `answer_s` is the time of an answer to `compose`."""

    stage: str
    results: tuple[Result, ...]
    folder: Path
    variety: Diversity | None
    answer_s: float

    @property
    def seconds(self) -> float:
        return sum(result.seconds for result in self.results)

    def score(self, task: str) -> Estimate:
        """The task's own metric."""
        return next(next(iter(r.metrics.values())) for r in self.results if r.task == task)


def evaluate_stage(stage: str, model: Transformer, tokenizer: BpeTokenizer, folder: Path, size: Demo) -> Evaluation:
    """Score the first items of each task."""
    with evaluating(model):
        engine = eval_engine(model, tokenizer, kv_memory=KV_MEMORY, cuda_graphs=False)
        # compiles its decode step, outside the timed tasks
        engine.generate([[tokenizer.eos_id]], Sampling(max_tokens=2))
        asked = EngineModel(engine, tokenizer, ChatEncoder(tokenizer), folder.name)
        limits = {COMPOSE: size.compose_items, LONG: size.compose_items, WRITE: size.write_items}
        results = [
            evaluate(asked, built_in(name, asked.max_len), out=folder, limit=limits.get(name, size.eval_items))
            for name in (*TASKS, *(LIBRARY_TASKS if size.library else ()))
        ]
    found = read_side(folder)
    variety = None
    if size.library:
        variety = diversity([text for row in found[WRITE].rows.values() for text in row["answers"]])
    return Evaluation(
        stage=stage,
        results=tuple(results),
        folder=folder,
        variety=variety,
        answer_s=results[0].seconds / len(found[COMPOSE].rows),
    )


def suggested(model: Transformer, tokenizer: BpeTokenizer, folder: Path) -> list[str]:
    """A held-out question for each kind of argument that the model answers rightly without sampling, for the chat page.
    Those of `folder`, the model's evaluation, that were right when sampled are asked again first."""
    task, rows = built_in(COMPOSE, model.config.max_len), read_side(folder)[COMPOSE].rows
    items = sorted((i for i in task.items() if i.id in rows), key=lambda i: -rows[i.id]["grades"][0])[:ASKED_AGAIN]
    with evaluating(model):
        engine = eval_engine(model, tokenizer, kv_memory=KV_MEMORY, cuda_graphs=False)
        asked = EngineModel(engine, tokenizer, ChatEncoder(tokenizer), folder.name)
        texts = asked.generate_chat([item.messages for item in items], Decoding(max_tokens=task.decoding.max_tokens))
    assert task.grade is not None
    right = [item for item, (grade,) in zip(items, task.grade(items, texts), strict=True) if grade == 1]
    questions = [str(item.messages[0]["content"]) for item in right]
    return list({q[q.index("(") : q.index(")")]: q for q in reversed(questions)}.values())[::-1]


def eval_words(found: Evaluation) -> str:
    """The score of each task with its interval, in one line."""
    scores = [f"{result.task} {SCALE.score_and_interval(found.score(result.task))}" for result in found.results]
    different = "" if found.variety is None else f", {100 * found.variety.bodies:.0f} % different"
    return ", ".join(scores) + different


def learned(before: Evaluation, after: Evaluation) -> str:
    """In plain words, what a stage changed on `compose`."""
    change = changes_of((before, after))[COMPOSE, after.stage]
    points = f"{100 * change.difference:+.0f} points ({100 * change.low:+.0f} to {100 * change.high:+.0f})"
    if math.isnan(change.low):
        return "too few items to say what it learned"
    if change.low > 0:
        return f"it learned: {points} on held-out functions"
    if change.high < 0:
        return f"it got worse: {points} on held-out functions"
    return f"it learned nothing that {before.score(COMPOSE).items} held-out functions show: {points}"


def eval_table(evaluations: Sequence[Evaluation], copying: Mapping[str, Estimate]) -> Table:
    """Each task after each stage, and the paired difference to the stage before; `copying` has the scores of copied
    answers by task."""
    note = (
        f"Held-out items, answers sampled at temperature 1. {COMPOSE}: functions of 2 or 3 verbs in an order, and with "
        f"a name, that no training item has, run in the sandbox; {LONG}: of 4 verbs, more than any training item has. "
        "Copying: the code of the demonstration whose question is nearest, under the asked name. "
    )
    if evaluations[0].variety is not None:
        note += (
            "continue4 and signature choose one of four: chance is 25 %. write: a function of the asked name, which no "
            "training file defines, with two statements or more that read the arguments; diverse: the share of "
            "different function bodies. "
        )
    note += (
        "Intervals are 95 %, by the bootstrap over items or files; a change is paired, item by item. All are in eval/."
    )
    columns = ("task (items)", "after", "score", "change", "p", "diverse")
    return Table(title="Tasks", columns=columns, rows=list(_rows(evaluations, copying)), note=note)


def changes_of(evaluations: Sequence[Evaluation]) -> dict[tuple[str, str], Comparison]:
    """By task and stage, the paired difference to the stage before; the first stage has none."""
    return {
        (c.task, b.stage): c.difference for a, b in pairwise(evaluations) for c in compare_folders(a.folder, b.folder)
    }


def _rows(evaluations: Sequence[Evaluation], copying: Mapping[str, Estimate]) -> Iterator[Sequence[object]]:
    changes = changes_of(evaluations)
    for task in (result.task for result in evaluations[0].results):
        items = f"{task} ({evaluations[0].score(task).items})"
        if task in copying:
            yield items, "copying", SCALE.score_and_interval(copying[task]), "", "", ""
            items = ""
        for found in evaluations:
            score, change = found.score(task), changes.get((task, found.stage))
            yield (
                items,
                found.stage,
                SCALE.score_and_interval(score),
                "" if change is None else SCALE.difference(change),
                "" if change is None else p_value(change),
                f"{100 * found.variety.bodies:.0f} %" if task == WRITE and found.variety is not None else "",
            )
            items = ""
