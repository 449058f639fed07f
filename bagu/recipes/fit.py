"""`bagu.fit`: train on texts, chats, a file or a folder, for a number of steps or of minutes.

Texts and chats in memory are written to the cache as JSON lines, so that a run has a file as its source like any other:
it can be reported, resumed and searched.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bagu.config import write_atomic
from bagu.errors import ArgumentError
from bagu.machine.cache import cache_folder
from bagu.machine.terminal import counted
from bagu.recipes.catalogue import recipe as find_recipe
from bagu.recipes.catalogue import with_data, with_start
from bagu.recipes.command import PROMPTS, report_of
from bagu.recipes.find import find_model
from bagu.recipes.language_model import Message, Model, Source, load
from bagu.recipes.length import progress_of, train_for, with_steps
from bagu.recipes.models import model_config
from bagu.recipes.run import Run, with_settings
from bagu.recipes.training import Trained, train

MINUTES = 2.0  # default
EVAL_BATCHES = 4  # the most batches of an evaluation

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
        return f"Fitted({str(self.folder)!r}, {counted(self.steps, 'step')}, loss {self.loss:.3f} nats{ended})"


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
        run = with_steps(run, steps)
        return _fitted(run, _train(folder, run))
    return _fitted(*train_for(minutes or MINUTES, run, began, partial(_train, folder)))


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


def _train(folder: Path, run: Run, resume: bool = False, pause_after: int | None = None) -> Trained:
    shown = progress_of(run, pause_after)
    return train(run, folder, resume=resume, pause_after=pause_after, progress=shown, prompts=PROMPTS)


def _fitted(run: Run, done: Trained) -> Fitted:
    return Fitted(
        folder=done.folder.path,
        steps=done.fit.step,
        metrics=done.fit.metrics,
        report=report_of(run, done),
        interrupted=done.fit.interrupted,
    )
