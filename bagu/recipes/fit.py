"""`bagu.fit`: train on texts, chats, a file or a folder, for a number of steps or of minutes.

Texts and chats in memory are written to the cache as JSON lines, so that a run has a file as its source like any other:
it can be reported, resumed and searched. With `minutes`, the first steps are timed and the run goes on with the number
of steps that fits. The learning rate stays at its peak for the first half of such a run (`wsd`), so the first steps are
those of a run that had this number from the start.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bagu.config import write_atomic
from bagu.errors import ArgumentError
from bagu.machine.cache import cache_folder
from bagu.recipes.catalogue import recipe as find_recipe
from bagu.recipes.catalogue import with_data, with_start
from bagu.recipes.command import PROMPTS, report_of
from bagu.recipes.find import find_model
from bagu.recipes.language_model import Message, Model, Source, load
from bagu.recipes.models import model_config
from bagu.recipes.run import Run, with_settings
from bagu.recipes.training import Trained, train
from bagu.runs.progress import TrainProgress
from bagu.train.schedule import ScheduleConfig

MINUTES = 2.0  # default
TIMED_STEPS = 8  # before the number of steps is chosen
EVALUATIONS, EVAL_BATCHES = 4, 4  # in a run, and the most batches of each
FORWARD_SHARE = 1 / 3  # the time of a forward as a fraction of a training step
OVERHEAD = 1.08  # samples and checkpoints, relative to the steps

Data = Source | Sequence[str] | Sequence[Sequence[Message]]


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A run that `fit` has finished; `interrupted` by Ctrl-C it has a model too, and `bagu train --resume` goes on."""

    folder: Path
    steps: int
    metrics: Mapping[str, float | int | None] = field(repr=False)  # of the last step; names end in the unit
    report: Path  # an HTML page
    interrupted: bool

    @property
    def loss(self) -> float:
        """In nats per token: of held-out text if there was an evaluation, else of the last step."""
        found = self.metrics.get("val_loss_nats", self.metrics.get("loss_nats"))
        return float("nan") if found is None else float(found)

    def model(self, **options: Any) -> Model:
        """The trained model; `options` are those of `load`."""
        return load(self.folder, **options)

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        ended = ", interrupted" if self.interrupted else ""
        return f"Fitted({str(self.folder)!r}, {self.steps} steps, loss {self.loss:.3f} nats{ended})"


def fit(
    data: Data,
    *,
    minutes: float | None = None,
    steps: int | None = None,
    start: Source | None = None,
    out: Source | None = None,
    recipe: str | None = None,
    settings: Sequence[str] = (),
) -> Fitted:
    """Train a model on texts, on chats (lists of messages), or on a file or folder of text, JSON or Parquet.

    It trains for `minutes` (2 by default, with reading the data) or `steps`. `start` is a model to begin with: a
    `Model`, a run, or what `load` takes; chats need one. The run is written to `out`, by default the first of runs/fit,
    runs/fit-2, … that does not exist. `recipe` is small, or sft for chats; `settings` changes single values of it, such
    as "train.optimizer.lr=1e-3".

    >>> run = bagu.fit(texts, steps=4, start=model, out="runs/more")
    >>> run.steps
    4
    >>> run.model().generate("one two three", max_tokens=2, temperature=0)
    ' four five'
    """
    began = time.monotonic()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as `bagu train`: train.deterministic needs it
    _check(minutes, steps, settings)
    path, is_chats = _written(data)
    if is_chats and start is None:
        raise ArgumentError("fit: chats are for a model that has read text, and start is None", hint="give start=MODEL")
    run = with_data(find_recipe(recipe or ("sft" if is_chats else "small")), [path])
    run = with_start(run, None if start is None else os.fspath(start))
    if run.init_from:
        most = model_config(find_model(run.init_from)).max_len
        run = replace(run, data=replace(run.data, context=min(run.data.context, most)))
    run = with_settings(replace(run, eval_batches=min(run.eval_batches, EVAL_BATCHES)), settings)
    folder = _free_folder() if out is None else Path(out)
    if steps is not None:
        warmup = min(run.train.schedule.warmup_steps, max(1, steps // 10))
        run = _with_steps(run, steps, replace(run.train.schedule, warmup_steps=warmup))
        return _fitted(run, _train(run, folder))
    warmup = min(run.train.schedule.warmup_steps, TIMED_STEPS)
    schedule = ScheduleConfig(kind="wsd", warmup_steps=warmup, decay_share=0.5)
    run = replace(run, train=replace(run.train, schedule=schedule))
    begun = _train(run, folder, pause_after=TIMED_STEPS)
    if begun.fit.interrupted:
        return _fitted(run, begun)
    left = 60 * (minutes or MINUTES) - (time.monotonic() - began)
    run = _with_steps(run, _fitting(begun, left), schedule)
    return _fitted(run, _train(run, folder, resume=True))


def _check(minutes: float | None, steps: int | None, settings: Sequence[str]) -> None:
    if minutes is not None and steps is not None:
        raise ArgumentError(f"fit: minutes = {minutes} and steps = {steps}", hint="give one of the two")
    if minutes is not None and not 0 < minutes < float("inf"):
        raise ArgumentError(f"fit: minutes = {minutes}", hint="more than 0")
    if steps is not None and steps < 1:
        raise ArgumentError(f"fit: steps = {steps}", hint="1 or more")
    if isinstance(settings, str):
        raise ArgumentError(f"fit: settings is the str {settings!r}", hint="give a list of them")
    if any(setting.startswith("train.steps=") for setting in settings):
        raise ArgumentError("fit: train.steps is among the settings", hint="give steps= or minutes= instead")


def _written(data: Data) -> tuple[str, bool]:
    """The path of the data, and whether they are chats in memory. What is in memory is written to the cache."""
    if isinstance(data, str | os.PathLike):
        path = os.fspath(data)
        if isinstance(data, str) and "\n" in path:
            raise ArgumentError("fit: a str is the path of a file or folder", hint="give texts as a list: [text]")
        return path, False
    rows = list(data)
    kinds = {"text" if isinstance(row, str) else "messages" if _is_chat(row) else type(row).__name__ for row in rows}
    if len(kinds) != 1 or not kinds <= {"text", "messages"}:
        found = " and ".join(sorted(kinds)) or "none"
        raise ArgumentError(f"fit: expected texts or chats, and found {found}", hint="a chat is a list of messages")
    (kind,) = kinds
    lines = "".join(json.dumps({kind: row}) + "\n" for row in rows)
    name = "texts" if kind == "text" else "chats"
    file = cache_folder() / "fit" / hashlib.sha256(lines.encode()).hexdigest()[:16] / f"{name}.jsonl"
    write_atomic(file, lines)
    return str(file), kind == "messages"


def _is_chat(row: Any) -> bool:
    return isinstance(row, Sequence) and bool(row) and all(isinstance(m, Mapping) and "role" in m for m in row)


def _free_folder() -> Path:
    names = ("runs/fit", *(f"runs/fit-{n}" for n in range(2, 10_000)))
    return next(path for path in map(Path, names) if not path.exists())


def _with_steps(run: Run, steps: int, schedule: ScheduleConfig) -> Run:
    """The run with this many steps, and what happens every so many of them often enough for a short run."""
    most = max(1, steps // EVALUATIONS)
    every = {
        name: min(value, most)
        for name in ("eval_every", "sample_every", "save_every")
        if (value := getattr(run.train, name)) is not None
    }
    return replace(run, train=replace(run.train, steps=steps, schedule=schedule, **every))


def _train(run: Run, folder: Path, *, resume: bool = False, pause_after: int | None = None) -> Trained:
    shown = TrainProgress(
        pause_after or run.train.steps, name=run.objective.kind if pause_after is None else "timing",
        formats=run.objective.display().progress, quiet=("resume",),
    )  # fmt: skip
    return train(run, folder, resume=resume, pause_after=pause_after, progress=shown, prompts=PROMPTS)


def _fitting(begun: Trained, seconds: float) -> int:
    """How many steps, with those of `begun`, fit into the time. The median leaves out the first, slow ones."""
    rows = begun.folder.metrics()
    step_s = statistics.median(row["tokens"] / row["tokens_per_s"] for row in rows)
    evaluations = EVALUATIONS * EVAL_BATCHES * FORWARD_SHARE
    return max(2 * TIMED_STEPS, TIMED_STEPS + int((seconds / step_s - evaluations) / OVERHEAD))


def _fitted(run: Run, done: Trained) -> Fitted:
    return Fitted(
        folder=done.folder.path, steps=done.fit.step, metrics=done.fit.metrics, report=report_of(run, done),
        interrupted=done.fit.interrupted,
    )  # fmt: skip
