"""The evaluation of a demo: two built-in tasks, scored after pretraining and after fine-tuning on the same items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bagu.data.tokenizer import BpeTokenizer
from bagu.eval.compare import Compared, compare_folders
from bagu.eval.intervals import Estimate
from bagu.eval.score import Result, evaluate
from bagu.eval.tasks import built_in
from bagu.nn.model import Transformer
from bagu.recipes.eval_models import EngineModel
from bagu.runs.display import Table
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine

__all__ = ["Evaluation", "eval_table", "eval_words", "evaluate_stage"]

TASKS = ("continue4", "signature")
KV_MEMORY = 64 << 20  # bytes: the models are small


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results of one stage, and the folder that holds every item."""

    results: tuple[Result, ...]
    folder: Path


def evaluate_stage(model: Transformer, tokenizer: BpeTokenizer, folder: Path, items: int) -> Evaluation:
    """Score the first `items` of each task."""
    was_training = model.training
    engine = Engine(model.eval(), tokenizer, EngineConfig(kv_memory=KV_MEMORY, cuda_graphs=False))
    asked = EngineModel(engine, tokenizer, None, folder.name)
    results = [evaluate(asked, built_in(name, asked.max_len), out=folder, limit=items) for name in TASKS]
    model.train(was_training)
    return Evaluation(results=tuple(results), folder=folder)


def eval_words(found: Evaluation) -> str:
    """The main metric of each task with its interval, in one line."""
    return ", ".join(f"{r.task} {_percent(next(iter(r.metrics.values())))}" for r in found.results)


def eval_table(before: Evaluation, after: Evaluation) -> Table:
    """Both stages and their paired difference."""
    compared = compare_folders(before.folder, after.folder)
    note = (
        "Held-out files; chance is 25 %. Intervals are 95 %, by the bootstrap over files; the difference is paired, "
        "item by item. Every item is in eval/."
    )
    return Table(
        title="Tasks", columns=("task", "items", "after pretraining", "after fine-tuning", "difference", "p"),
        rows=[_row(c) for c in compared], note=note,
    )  # fmt: skip


def _row(c: Compared) -> Sequence[object]:
    d = c.difference
    moved = f"{100 * d.difference:+.0f} ({100 * d.low:+.0f} to {100 * d.high:+.0f})"
    return c.task, c.a.items, _percent(c.a), _percent(c.b), moved, f"{d.p_value:.2g}"


def _percent(e: Estimate) -> str:
    return f"{100 * e.mean:.0f} % ({100 * e.low:.0f} to {100 * e.high:.0f})"
