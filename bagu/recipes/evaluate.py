"""The implementation of `bagu eval`: load the model and the tasks, evaluate, print a table, save the items."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bagu.errors import ArgumentError, UnknownName
from bagu.eval.benchmarks import BENCHMARKS, benchmark
from bagu.eval.compare import compare_folders
from bagu.eval.contamination import check_contamination
from bagu.eval.files import read_task
from bagu.eval.intervals import as_row
from bagu.eval.judge import Judge
from bagu.eval.report import write_comparison
from bagu.eval.score import Result, evaluate
from bagu.eval.task import NORMALIZATIONS, Task, checked_items
from bagu.eval.tasks import TASKS, built_in
from bagu.eval.words import p_value, scale_of
from bagu.machine.terminal import Terminal
from bagu.recipes.lookup import WAYS, finder, lookup_task
from bagu.recipes.verbs import CompareOptions, EvalOptions
from bagu.retrieve.prompt import most_passages
from bagu.runs.plain_progress import PlainLines
from bagu.runs.progress import draws


def find_task(name: str, max_len: int, judge: Judge | None = None) -> Task:
    """A built-in task by name, a public benchmark as NAME=PATH, or a task file."""
    kind, equals, path = name.partition("=")
    if equals and kind in BENCHMARKS:
        return benchmark(kind, Path(path))
    if name.endswith(".toml") or Path(name).is_file():
        return read_task(Path(name), judge)
    if name in WAYS[1:]:
        return lookup_task(name)
    if name in BENCHMARKS:
        raise ArgumentError(f"the data of {name} are not part of bagu", hint=f"name your files: {name}=PATH")
    if name not in TASKS:
        raise UnknownName.among("task", name, [*TASKS, *WAYS, *(f"{b}=PATH" for b in BENCHMARKS), "TASK.toml"])
    return built_in(name, max_len)


def eval_main(given: EvalOptions) -> int:
    normalization, limit, quantization = given.normalization, given.limit, given.quantization
    if normalization is not None and normalization not in NORMALIZATIONS:
        raise UnknownName.among("normalization", normalization, NORMALIZATIONS)
    if limit is not None and limit < 1:
        raise ArgumentError(f"--limit {limit}", hint="1 or more")
    from bagu.recipes.eval_models import model_of

    console = Terminal(stderr=given.as_json, highlight=False)
    asked, identity = model_of(given)
    folder = given.out or Path("evals") / (asked.name if quantization is None else f"{asked.name}-{quantization}")
    found = _tasks(given, asked.max_len)
    if normalization is not None and not any(task.kind == "choice" for task in found):
        raise ArgumentError("--normalization, and no task is multiple choice", hint="leave it out")
    changes: dict[str, Any] = {
        k: v for k, v in (("few_shot", given.few_shot), ("normalization", normalization)) if v is not None
    }
    results = []
    for task in found:
        task = replace(task, **changes)
        with item_progress(task.name) as progress:
            results.append(
                evaluate(asked, task, out=folder, limit=limit, seed=given.seed, identity=identity, progress=progress)
            )
        if given.training is not None:
            _report_contamination(task, limit, given.training, console)
    for result in results:
        if result.ungraded:
            graded = next(iter(result.metrics.values())).items
            console.print(
                f"[yellow]{result.task}: the judge gave no grade for {result.ungraded} of {graded + result.ungraded} "
                "items[/]; they are not in the score"
            )
    if given.as_json:
        print(json.dumps([_plain(result) for result in results], indent=1, ensure_ascii=False))
    else:
        console.print(table(results))
        console.print(
            f"[dim]every item: {folder}/TASK/items.jsonl; next: bagu compare OTHER {folder}[/]", soft_wrap=True
        )
    return 0


def _tasks(given: EvalOptions, max_len: int) -> list[Task]:
    """The tasks, with the judge for those whose file has a judge's prompt; `lookup` is three of them."""
    if (given.index is not None) != ("lookup" in given.tasks):
        what = "the task lookup needs an index" if given.index is None else "--with, and no task lookup"
        raise ArgumentError(what, hint="bagu eval MODEL lookup --with INDEX; without one, lookup_given")
    names = [name for name in given.tasks if name != "lookup"]
    most = most_passages(given.passages, given.index)
    asked = [] if given.index is None else [lookup_task(name, finder(given.index, max_len, most)) for name in WAYS]
    if given.judge is None:
        return [*asked, *(find_task(name, max_len) for name in names)]
    from bagu.recipes.judges import judge_of

    grader = judge_of(given.judge, api_key=given.judge_api_key, device=given.device)
    found = [*asked, *(find_task(name, max_len, grader) for name in names)]
    if not any(task.judge for task in found):
        raise ArgumentError("--judge, and no task has a judge's prompt", hint="leave it out, or write `judge = …`")
    return found


@contextmanager
def item_progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """A progress line on a terminal, plain lines elsewhere; both on stderr, because a table follows on stdout."""
    console = Terminal(stderr=True)
    if not draws(console):
        yield PlainLines("items", console, prefix=f"{name}: ")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def table(results: Sequence[Result]) -> Table:
    made = Table(title=f"{results[0].model}", title_justify="left")
    for i, head in enumerate(("task", "metric", "score", "95 % interval", "items", "clusters")):
        made.add_column(head, justify="left" if i < 2 else "right")
    for result in results:
        for number, (name, value) in enumerate(result.metrics.items()):
            scale = scale_of(name)
            made.add_row(
                result.task if number == 0 else "",
                name,
                scale.score(value),
                scale.interval(value),
                f"{value.items:,}",
                f"{value.clusters:,}",
            )
    return made


def _plain(result: Result) -> dict[str, Any]:
    return {
        "task": result.task,
        "model": result.model,
        "seconds": result.seconds,
        "limits": result.limits,
        "ungraded": result.ungraded,
        "metrics": {name: as_row(value) for name, value in result.metrics.items()},
    }


def _report_contamination(task: Task, limit: int | None, training: Path, console: Console) -> None:
    found = check_contamination(checked_items(task, limit), training_texts(training))
    if found.found:
        console.print(
            f"[yellow]{task.name}: {len(found.found)} of {found.items} items are in the training text of {training}[/]"
            f" (the first: {found.found[0]})"
        )
    else:
        short = f"; {found.short} are too short to tell" if found.short else ""
        console.print(f"[dim]{task.name}: none of {found.items} items is in the training text of {training}{short}[/]")


def training_texts(path: Path) -> Iterator[str]:
    """The training text of a run folder, or any text, JSON lines or Parquet."""
    from bagu.data.source import open_source
    from bagu.recipes.run import load_run
    from bagu.runs.folder import RunFolder

    folder = RunFolder(path)
    if path.is_dir() and folder.is_run():
        for corpus in load_run(folder.config_path).corpora().values():
            yield from corpus.training_texts()
        return
    yield from (document.text for document in open_source(path).documents())


def compare_main(given: CompareOptions) -> int:
    """`bagu compare A B`: compare two folders of results."""
    a, b = given.a, given.b
    found = compare_folders(a, b)
    page = write_comparison(found, (a.name, b.name), given.out or b / f"against-{a.name}.html")
    if given.as_json:
        rows = ({"a": as_row(c.a), "b": as_row(c.b), "difference": as_row(c.difference)} for c in found)
        print(
            json.dumps([asdict(replace(c, differing=())) | row for c, row in zip(found, rows, strict=True)], indent=1)
        )
        return 0
    console = Terminal(highlight=False)
    made = Table(title=f"{b.name} against {a.name}", title_justify="left")
    for i, head in enumerate(("task", "metric", a.name, b.name, "difference, 95 %", "p")):
        made.add_column(head, justify="left" if i < 2 else "right", no_wrap=i > 3)
    for c in found:
        made.add_row(
            c.task,
            c.metric.replace("_", " "),
            c.scale.score(c.a),
            c.scale.score(c.b),
            c.scale.difference(c.difference),
            p_value(c.difference),
        )
    console.print(made)
    console.print(f"[dim]clusters: {', '.join(f'{c.task} {c.difference.clusters:,}' for c in found)}[/]")
    console.print(f"[dim]page: {page}[/]")
    return 0
