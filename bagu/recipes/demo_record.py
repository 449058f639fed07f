"""The record of a demo: one row for each stage and task, in FOLDER/record.jsonl.

`python -m benchmarks.tools.tables --demo FOLDER` adds it to benchmarks/results, from which the READMEs show the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bagu.eval.intervals import as_row
from bagu.machine.environment import environment
from bagu.nn import count
from bagu.recipes.demo_eval import WRITE, changes_of
from bagu.recipes.demo_report import Finished
from bagu.runs.record import append_rows

RECORD = "record.jsonl"


def write_record(out: Path, done: Finished, seconds: float) -> None:
    env = environment()
    append_rows(out / RECORD, ({**row, "env": env} for row in _rows(done, seconds)))


def _rows(done: Finished, seconds: float) -> Iterator[dict[str, Any]]:
    size = done.size
    common = {
        "system": "demo",
        "size": size.name,
        "quick": done.plan is None,
        "budget_s": None if done.plan is None else done.plan.budget_s,
        "seconds": seconds,
        "parameters": count.parameters(done.base.model.config).total,
        "pretrain_tokens": done.base.fit.step * size.tokens_per_step,
        "bits_per_byte": done.bits,
        "gzip_bits_per_byte": done.stock.gzip_bits_per_byte,
    }
    changes = changes_of(done.evaluations)
    for stage in done.stages:
        variety = stage.evaluation.variety
        for task in (result.task for result in stage.evaluation.results):
            score, change = stage.evaluation.score(task), changes.get((task, stage.name))
            interval = as_row(score)
            rise = dict.fromkeys(("difference", "low", "high", "p_value")) if change is None else as_row(change)
            yield {
                **common, "stage": stage.name, "steps": stage.trained.fit.step, "task": task, "items": score.items,
                "score": score.mean, "low": interval["low"], "high": interval["high"],
                "change": rise["difference"], "change_low": rise["low"], "change_high": rise["high"],
                "p_value": rise["p_value"],
                "different": None if task != WRITE or variety is None else variety.bodies,
            }  # fmt: skip
