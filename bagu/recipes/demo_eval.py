"""The evaluation of a demo: three built-in tasks, scored after each stage of training on the same items.

`write` is the score of post-training: the share of sampled answers that are a function of the asked name, with names
that no training file has. The diversity of these answers is shown beside it, because one text repeated under each name
could score as high.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from bagu.data.chat import ChatEncoder
from bagu.data.tokenizer import BpeTokenizer
from bagu.eval.compare import compare_folders, read_side
from bagu.eval.diversity import Diversity, diversity
from bagu.eval.intervals import Comparison, Estimate
from bagu.eval.score import Result, evaluate
from bagu.eval.tasks import built_in
from bagu.eval.words import PERCENT, p_value
from bagu.nn.change import evaluating
from bagu.nn.model import Transformer
from bagu.recipes.demo_sizes import Demo
from bagu.recipes.eval_models import EngineModel, eval_engine
from bagu.runs.display import Table
from bagu.serve.request import Sampling

WRITE = "write"
TASKS = ("continue4", "signature", WRITE)
SCALE = replace(PERCENT, digits=0)  # the intervals of a demo are wide
KV_MEMORY = 64 << 20  # bytes: the models are small


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results after one stage, and the folder that holds every item. `variety` is of the answers to `write`, and
    `answer_s` the time of one of them."""

    stage: str
    results: tuple[Result, ...]
    folder: Path
    variety: Diversity
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
        results = [
            evaluate(
                asked,
                built_in(name, asked.max_len),
                out=folder,
                limit=size.write_items if name == WRITE else size.eval_items,
            )
            for name in TASKS
        ]
    answers = [text for row in read_side(folder)[WRITE].rows.values() for text in row["answers"]]
    return Evaluation(
        stage=stage, results=tuple(results), folder=folder, variety=diversity(answers),
        answer_s=results[-1].seconds / len(answers),
    )  # fmt: skip


def eval_words(found: Evaluation) -> str:
    """The score of each task with its interval, in one line."""
    scores = [f"{result.task} {SCALE.score_and_interval(found.score(result.task))}" for result in found.results]
    return f"{', '.join(scores)}, {100 * found.variety.bodies:.0f} % different"


def eval_table(evaluations: Sequence[Evaluation]) -> Table:
    """Each task after each stage, and the paired difference to the stage before."""
    note = (
        "Held-out files. `continue4` and `signature` choose one of four: chance is 25 %. `write`: sampled answers that "
        "are a function of the asked name, which no training file defines, with two statements or more that read the "
        "arguments. Intervals are 95 %, by the bootstrap over files; a change is paired, item by item. Every item is "
        "in eval/. `different`: the share of different function bodies."
    )
    columns = ("task (items)", "after", "score", "change", "p", "different")
    return Table(title="Tasks", columns=columns, rows=list(_rows(evaluations)), note=note)


def changes_of(evaluations: Sequence[Evaluation]) -> dict[tuple[str, str], Comparison]:
    """By task and stage, the paired difference to the stage before; the first stage has none."""
    return {
        (c.task, b.stage): c.difference for a, b in pairwise(evaluations) for c in compare_folders(a.folder, b.folder)
    }


def _rows(evaluations: Sequence[Evaluation]) -> Iterator[Sequence[object]]:
    changes = changes_of(evaluations)
    for task in (result.task for result in evaluations[0].results):
        for number, found in enumerate(evaluations):
            score, change = found.score(task), changes.get((task, found.stage))
            yield (
                f"{task} ({score.items})" if number == 0 else "", found.stage, SCALE.score_and_interval(score),
                "" if change is None else SCALE.difference(change), "" if change is None else p_value(change),
                f"{100 * found.variety.bodies:.0f} %" if task == WRITE else "",
            )  # fmt: skip
