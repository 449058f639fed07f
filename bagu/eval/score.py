"""`evaluate`: scores a model on a task and writes the items as JSON lines.

Items are scored in batches, and the rows of a batch are written to `items.jsonl` before the next batch starts, so a
killed evaluation can resume. Results of another model, another version of the task or other settings are never mixed:
the header, the first line of the file, identifies all of them.
"""

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bagu.config import write_atomic
from bagu.eval.choice import answers, score_choices
from bagu.eval.grades import generate_answers
from bagu.eval.intervals import Estimate, as_row, estimate, estimate_ratio, pass_at_k
from bagu.eval.loss import score_documents
from bagu.eval.model import Model
from bagu.eval.task import Item, Task, TaskError, checked_items
from bagu.eval.words import scale_of
from bagu.machine.environment import environment
from bagu.runs.record import append_rows, read_rows

BATCH = 256  # items: enough to fill an engine's steps, few enough to lose little if the process is killed

Row = dict[str, Any]
Progress = Callable[[int, int], None]  # items done, items in all


@dataclass(frozen=True, kw_only=True)
class Result:
    """`metrics` has the task's own metric first, then other metrics of the same scores."""

    task: str
    model: str
    metrics: Mapping[str, Estimate]
    seconds: float
    limits: str
    folder: Path | None
    ungraded: int = 0  # items without a valid grade of the judge; the metrics leave them out

    def __repr__(self) -> str:
        name, value = next(iter(self.metrics.items()))
        score = scale_of(name).score_and_interval(value)
        return f"Result({self.model} on {self.task}: {name} {score}, {value.items} items)"


def evaluate(
    model: Model,
    task: Task,
    *,
    out: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    identity: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Result:
    """Score the task's items, or the first `limit` of them. `identity` holds the other facts that affect the results:
    the weights' fingerprint, the dtype. Without `out`, nothing is written."""
    items = checked_items(task, limit)
    prefix, items = few_shot(task, items, seed)
    header = {"header": _header(model, task, items, prefix, seed, identity or {})}
    file = None if out is None else out / task.name / "items.jsonl"
    done = {} if file is None else _resumed(file, header)
    began = time.perf_counter()
    rows = _scored(model, task, items, prefix, file, done, progress)
    ordered = [rows[item.id] for item in items]
    kept = graded(ordered)
    if not kept:
        said = ordered[0]["judgements"][0]
        raise TaskError(
            f"task {task.name}: the judge graded none of {len(ordered)} items; its first answer: {said.strip()[:80]!r}",
            hint="its prompt must ask for a last line `Grade: N`",
        )
    result = Result(
        task=task.name,
        model=model.name,
        metrics=metrics_of(task, kept),
        seconds=time.perf_counter() - began,
        limits=task.limits,
        folder=None if out is None else out / task.name,
        ungraded=len(ordered) - len(kept),
    )
    if result.folder is not None:
        _write(result, task, header)
    return result


def _scored(
    model: Model,
    task: Task,
    items: Sequence[Item],
    prefix: str,
    file: Path | None,
    done: Mapping[str, Row],
    progress: Progress | None,
) -> dict[str, Row]:
    """The rows of all items by id: `done`, and the rest, scored in batches that are appended to `file`."""
    rows, todo = dict(done), [item for item in items if item.id not in done]
    for at in range(0, len(todo), BATCH):
        if progress is not None:
            progress(len(rows), len(items))
        batch = todo[at : at + BATCH]
        found = [
            {"id": item.id, "cluster": item.cluster, **_shown(item), **row}
            for item, row in zip(batch, _score(model, task, batch, prefix), strict=True)
        ]
        if file is not None:
            append_rows(file, found)
        rows |= {row["id"]: row for row in found}
    if progress is not None:
        progress(len(items), len(items))
    return rows


def _score(model: Model, task: Task, items: Sequence[Item], prefix: str) -> list[Row]:
    if task.kind == "choice":
        return score_choices(model, task, items, prefix)
    if task.kind == "generation":
        return generate_answers(model, task, items, prefix)
    return score_documents(model, task, items)


def few_shot(task: Task, items: Sequence[Item], seed: int) -> tuple[str, list[Item]]:
    """The examples that precede every question, and the remaining items.

    All questions have the same examples, drawn by the seed, so the common prefix of the prompts is computed once.
    """
    if not task.few_shot:
        return "", list(items)
    if task.example is None:
        raise TaskError(f"task {task.name} has no form for few-shot examples", hint="leave out --few-shot")
    if len(items) <= task.few_shot:
        raise TaskError(f"task {task.name}: {task.few_shot} examples of {len(items)} items leave none to ask")
    chosen = set(random.Random(seed).sample(range(len(items)), task.few_shot))
    examples = [task.example(items[i]) for i in sorted(chosen, key=lambda i: random.Random(f"{seed}:{i}").random())]
    return "\n\n".join([*examples, ""]), [item for i, item in enumerate(items) if i not in chosen]


def graded(rows: Sequence[Row]) -> list[Row]:
    """The rows without those for which a judge gave no valid grade."""
    return [row for row in rows if None not in row.get("grades", ())]


def metrics_of(task: Task, rows: Sequence[Row]) -> dict[str, Estimate]:
    """The task's metric first."""
    clusters = [row["cluster"] or row["id"] for row in rows]
    if task.kind == "loss":
        bits, sizes = [row["nats"] / math.log(2) for row in rows], [row["bytes"] for row in rows]
        return {main_metric(task): estimate_ratio(bits, sizes, clusters)}
    scores = item_scores(task.kind, rows, task.k)
    found = {_named(task, name): estimate(values, clusters) for name, values in scores.items()}
    measured = {name: estimate([sum(row[name]) / len(row[name]) for row in rows], clusters) for name in task.measures}
    return {main_metric(task): found[main_metric(task)], **found, **measured}


def main_metric(task: Task) -> str:
    """The name of the task's own metric."""
    if task.kind == "loss":
        return "bits_per_byte"
    return _named(task, task.normalization if task.kind == "choice" else f"pass@{task.k[0]}")


def _named(task: Task, score: str) -> str:
    return task.metric if score in ("raw", "pass@1") else f"{task.metric}_{score}"


def item_scores(kind: str, rows: Sequence[Row], k: Sequence[int] = (1,)) -> dict[str, list[float]]:
    """The score of each item, 0 to 1, by normalisation or by k."""
    if kind == "choice":
        chosen = [answers(row) for row in rows]
        return {name: [float(c[name] == r["answer"]) for c, r in zip(chosen, rows, strict=True)] for name in chosen[0]}
    return {
        f"pass@{n}": [
            pass_at_k(len(row["grades"]), sum(g == 1.0 for g in row["grades"]), n)
            if n > 1
            else sum(row["grades"]) / len(row["grades"])
            for row in rows
        ]
        for n in k
    }


def _shown(item: Item) -> Row:
    """The part of an item that is written for readers of the results."""
    shown: Row = {"prompt": item.prompt} if item.prompt else {"messages": [dict(m) for m in item.messages]}
    return shown | ({"choices": list(item.choices)} if item.choices else {})


def _header(
    model: Model, task: Task, items: Sequence[Item], prefix: str, seed: int, identity: Mapping[str, Any]
) -> dict[str, Any]:
    """The facts that affect the results. `identity` comes from the caller: the weights, the dtype, the arithmetic."""
    digest = hashlib.sha256()
    for item in items:
        asked = [item.id, item.prompt, [dict(m) for m in item.messages], item.choices, item.answer, item.cluster]
        digest.update(json.dumps([*asked, dict(item.facts)], default=str).encode())  # Parquet has dates
    settings = {
        "kind": task.kind,
        "few_shot": task.few_shot,
        "delimiter": task.delimiter,
        "stride": task.stride,
        "normalization": task.normalization,
        "decoding": asdict(task.decoding),
        "seed": seed,
        "judged": task.judged,
        **({"measures": list(task.measures)} if task.measures else {}),
    }
    prefix_digest = hashlib.sha256(prefix.encode()).hexdigest()
    return {
        "task": task.name,
        "items": digest.hexdigest(),
        "examples": prefix_digest,
        "settings": settings,
        "model": model.name,
        "identity": dict(identity),
    }


def _resumed(file: Path, header: Row) -> dict[str, Row]:
    """The rows of an earlier run with this header; raises if the header differs."""
    if not file.exists():
        append_rows(file, [header])
        return {}
    first, *rows = _whole_rows(file)
    if not rows:  # an evaluation that ended before its first batch
        write_atomic(file, json.dumps(header) + "\n")
        return {}
    theirs = first.get("header")
    if theirs != json.loads(json.dumps(header["header"])):
        changed = [
            k for k, v in header["header"].items() if theirs is None or theirs.get(k) != json.loads(json.dumps(v))
        ]
        raise TaskError(
            f"{file} holds results of another evaluation ({', '.join(changed)} differ)",
            hint="give another folder with --out, or delete that one",
        )
    return {row["id"]: row for row in rows}


def _whole_rows(file: Path) -> list[Row]:
    """The rows of the file; first removes an incomplete last line, which a killed process leaves."""
    data = file.read_bytes()
    if not data.endswith(b"\n"):
        file.write_bytes(data[: data.rfind(b"\n") + 1])
    rows = read_rows(file)
    return rows or [{}]


def _write(result: Result, task: Task, header: Row) -> None:
    assert result.folder is not None
    facts = {
        **header["header"],
        "limits": result.limits,
        "seconds": result.seconds,
        "environment": environment(),
        "metrics": {name: as_row(value) for name, value in result.metrics.items()},
        "k": list(task.k),
        "ungraded": result.ungraded,
    }
    write_atomic(result.folder / "result.json", json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
