"""The run folder: everything a training run leaves behind, and the observer that writes it while the run goes on.

    config.json        what was asked for                  metrics.jsonl   a row a step
    environment.json   what it ran on                      events.jsonl    starts, skips, rollbacks, saves: a log
    checkpoints/       the trainer's                       samples/        texts by step
    tensorboard/       event files, when it is installed   report.html     `bagu.train.report` makes it
    run.lock           who is writing

A run may be killed at any moment. Metrics are a function of the step: a row torn by the kill is dropped when the folder
is opened, and `rewind` drops the rows of steps that will run again, so none stands twice. Events are a history: what
happened twice is there twice.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import numbers
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from bagu import config as configs
from bagu.errors import BaguError
from bagu.machine import environment
from bagu.runs import record
from bagu.runs.lock import Lock
from bagu.runs.observer import Metrics, Observer, TensorBoard

__all__ = ["RunFolder", "RunRecorder"]


class RunFolder:
    """The paths of a run and what can be read from them; `create` also gives the right to write.

    Reading needs no lock and may happen while the run goes on.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.json"
        self.environment_path = self.path / "environment.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.events_path = self.path / "events.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.samples_path = self.path / "samples"
        self.tensorboard = self.path / "tensorboard"
        self.report = self.path / "report.html"
        self.lock = Lock(self.path / "run.lock")

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: Any, *, resume: bool = False) -> Self:
        """`claim` the folder and `begin` a run of `config` in it."""
        folder = cls.claim(path, resume=resume)
        try:
            folder.begin(config)
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def claim(cls, path: str | os.PathLike[str], *, resume: bool = False) -> Self:
        """The right to write to a new or empty folder, or with `resume` to one that holds a run. `close` ends it.

        Nothing of a run that is there changes. The caller checks all that can be wrong with its input, then calls
        `begin`: a resume that is refused in between leaves the run as it was.
        """
        folder = cls(path)
        folder.check_free(resume=resume)
        with _writing(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.lock.take()
        return folder

    def begin(self, config: Any) -> None:
        """Write config.json and environment.json. The event of the start says what differs from the last start."""
        _drop_torn_row(self.metrics_path)
        _drop_torn_row(self.events_path)
        before = {"config": self.config(), "environment": self.environment()} if self.is_run() else None
        now = {"config": configs.to_dict(config), "environment": environment.environment()}
        with _writing(self.path):
            configs.write_whole(self.environment_path, json.dumps(now["environment"], indent=2) + "\n")
            configs.save(config, self.config_path)  # last: with it the folder is a run
        changed = [line for line in configs.diff(before, now) if not line.startswith("environment.time:")]
        _append(self.events_path, _event("start", None, resumed=before is not None, changed=changed if before else []))

    def close(self) -> None:
        """Let another process write."""
        self.lock.release()

    def is_run(self) -> bool:
        return self.config_path.exists()

    def config(self) -> dict[str, Any]:
        """The run's configuration as plain JSON; `bagu.config.load` makes the tree of it."""
        return _read_object(self.config_path)

    def environment(self) -> dict[str, Any]:
        return _read_object(self.environment_path)

    def metrics(self) -> list[dict[str, Any]]:
        """A row a step, in the order of steps."""
        return _rows(self.metrics_path)

    def events(self) -> list[dict[str, Any]]:
        """What happened, in the order of time."""
        return _rows(self.events_path)

    def samples(self) -> dict[int, list[str]]:
        """The texts by step, in the order of steps."""
        return {step: _read_object(path)["texts"] for step, path in self._sample_files()}

    def _sample_files(self) -> list[tuple[int, Path]]:
        return [(int(path.stem), path) for path in sorted(self.samples_path.glob("[0-9]*.json"))]

    def check_free(self, *, resume: bool) -> None:
        """Refuse a path that a run cannot be written to: a file, another run (unless it is resumed), other files."""
        if self.path.exists() and not self.path.is_dir():
            raise BaguError(f"{self.path} is a file, and a run is a folder", hint="give another path")
        if self.is_run():
            if not resume:
                raise BaguError(f"{self.path} already holds a run", hint="resume it, or give another folder")
            return
        ours = {self.lock.path, self.environment_path}  # all that a run killed in its first moment can have left
        found = [p for p in self.path.glob("*") if p not in ours and not p.name.endswith(".tmp")]
        if found:
            raise BaguError(
                f"{self.path} is not a run and not empty: it has {found[0].name}", hint="give a new or empty folder"
            )


class RunRecorder(Observer):
    """The observer that keeps the record: to the folder, to TensorBoard, to the progress line and to other trackers.

    A metric that is not finite goes on as None, with an event that says which. `tensorboard=None` writes event files
    when TensorBoard is installed and says so once when it is not; True insists. Closing it closes the folder.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        progress: Observer | None = None,
        tensorboard: bool | None = None,
        trackers: Sequence[Observer] = (),
    ) -> None:
        if not folder.lock.held:
            raise BaguError(f"{folder.path} is open for reading only", hint="open it with RunFolder.create")
        self.folder = folder
        self.others = [*([progress] if progress else []), *trackers]
        if tensorboard is None and environment.package_version("tensorboard") is None:
            print("bagu: no TensorBoard files, it is not installed (pip install 'bagu[tensorboard]')", file=sys.stderr)
        elif tensorboard is not False:
            self.others.append(TensorBoard(folder.tensorboard))

    def on_step(self, step: int, metrics: Metrics) -> None:
        known = {name: _number(name, value) for name, value in metrics.items()}
        finite = {k: v if v is None or math.isfinite(v) else None for k, v in known.items()}
        _append(self.folder.metrics_path, {"step": step, **finite})
        for observer in self.others:
            observer.on_step(step, finite)
        if lost := {name: str(known[name]) for name in known if known[name] is not None and finite[name] is None}:
            self.on_event("non_finite", step, metrics=lost)

    def on_event(self, kind: str, step: int, **facts: Any) -> None:
        _append(self.folder.events_path, _event(kind, step, **facts))
        for observer in self.others:
            observer.on_event(kind, step, **facts)

    def on_sample(self, step: int, texts: Sequence[str]) -> None:
        data = {"step": step, "texts": list(texts)}
        path = self.folder.samples_path / f"{step:09d}.json"
        configs.write_whole(path, json.dumps(data, ensure_ascii=False, indent=2) + "\n")
        for observer in self.others:
            observer.on_sample(step, texts)

    def rewind(self, step: int) -> None:
        """Drop the rows and samples of `step` and after. Rows go in one cut: a kill leaves all or the right ones."""
        _truncate(self.folder.metrics_path, step)
        for at, path in self.folder._sample_files():
            if at >= step:
                path.unlink()
        for observer in self.others:
            observer.rewind(step)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # each is closed, even if the one before it fails
            stack.callback(self.folder.close)
            for observer in self.others:
                stack.callback(observer.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A full disk, or a folder that cannot be written, as one sentence."""
    try:
        yield
    except OSError as error:
        raise BaguError(
            f"the run folder {path} cannot be written: {error.strerror or error}",
            hint="free some disk space, or give another folder",
        ) from error


# Rows


def _append(path: Path, row: Mapping[str, Any]) -> None:
    """One row, in the file when this returns. A row that did not fit on the disk is taken back and is an error."""
    size = path.stat().st_size if path.exists() else 0
    try:
        record.append_rows(path, [row])
    except BaseException as error:
        if path.exists():
            os.truncate(path, size)
        if isinstance(error, OSError):
            raise BaguError(
                f"{path}: a row cannot be written: {error}", hint="free some disk space, then resume"
            ) from error
        raise


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows; one that is being written just now is not there yet."""
    rows = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise BaguError(f"{path}:{number}: not JSON: {error}", hint="mend or delete that line") from error
    return rows


def _lines(path: Path) -> list[bytes]:
    """The lines that are whole, without their ends."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _drop_torn_row(path: Path) -> None:
    whole = sum(len(line) + 1 for line in _lines(path))
    if path.exists() and path.stat().st_size != whole:
        os.truncate(path, whole)


def _truncate(path: Path, step: int) -> None:
    """Drop the rows from the first of `step` or after. Rows are in the order of steps, so this is one cut."""
    keep = 0
    for line, row in zip(_lines(path), _rows(path), strict=True):
        if row["step"] >= step:
            os.truncate(path, keep)
            return
        keep += len(line) + 1


def _event(kind: str, step: int | None, **facts: Any) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"step": step, "kind": kind, "time": now, **facts}


def _number(name: str, value: Any) -> float | int | None:
    if value is None or isinstance(value, numbers.Integral):
        return value if value is None else int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise BaguError(
        f"the metric {name} is a {type(value).__name__}", hint="a metric is a number; read a tensor with .item()"
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BaguError(f"there is no {path}", hint=f"{path.parent} is not the folder of a run") from None
    except (ValueError, RecursionError) as error:
        raise BaguError(f"{path}: not JSON: {error}", hint="it was changed by hand; mend it") from error
    if not isinstance(data, dict):
        raise BaguError(f"{path} holds a {type(data).__name__}, not a JSON object", hint="it was changed by hand")
    return data
