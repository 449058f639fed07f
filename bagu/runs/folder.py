"""The run folder open for writing, and the observer that writes its files (files.py lists them).

A run may be killed at any time. A partial row in metrics.jsonl is dropped when the folder is opened, and `rewind` drops
the rows of steps that will run again, so that each step has one row. The event log keeps everything: an event that
happened twice is there twice.
"""

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
from bagu.runs.files import RunFiles, complete_lines, complete_rows
from bagu.runs.lock import Lock
from bagu.runs.observer import Metrics, Observer, TensorBoard


class RunFolder(RunFiles):
    """The files of a run; `create` opens them for writing."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
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
        """Lock a new or empty folder for writing, or with `resume` one that holds a run. `close` releases the lock.

        This changes no file of an existing run. The caller checks its inputs and then calls `begin`; if a check fails,
        the run is unchanged.
        """
        folder = cls(path)
        folder.check_free(resume=resume)
        with _writing(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.lock.take()
        return folder

    def begin(self, config: Any, *, code: str | None = None) -> None:
        """Write config.json and environment.json, with the hash of the `code` that runs. The start event lists the
        differences from the last start."""
        _drop_torn_row(self.metrics_path)
        _drop_torn_row(self.events_path)
        before = {"config": self.config(), "environment": self.environment()} if self.is_run() else None
        now = {"config": configs.to_dict(config), "environment": environment.environment()}
        now["environment"] |= {} if code is None else {"code": code}
        with _writing(self.path):
            configs.write_atomic(self.environment_path, json.dumps(now["environment"], indent=2) + "\n")
            configs.save(config, self.config_path)  # last, because config.json marks the folder as a run
        changed = [line for line in configs.diff(before, now) if not line.startswith("environment.time:")]
        _append(self.events_path, _event("start", None, resumed=before is not None, changed=changed if before else []))

    def close(self) -> None:
        """Release the lock."""
        self.lock.release()

    def check_free(self, *, resume: bool) -> None:
        """Raise if a run cannot be written to this path: a file, another run (unless `resume`), or unrelated files."""
        if self.path.exists() and not self.path.is_dir():
            raise BaguError(f"{self.path} is a file; a run needs a folder", hint="give another path")
        if self.is_run():
            if not resume:
                raise BaguError(f"{self.path} already holds a run", hint="resume it, or give another folder")
            return
        ours = {self.lock.path, self.environment_path}  # a run killed at its very start may leave these
        found = [p for p in self.path.glob("*") if p not in ours and not p.name.endswith(".tmp")]
        if found:
            raise BaguError(
                f"{self.path} is not empty and is not a run: it has {found[0].name}", hint="give a new or empty folder"
            )


class RunRecorder(Observer):
    """Writes metrics, events and samples to the folder, TensorBoard, the progress line and other trackers.

    A metric that is not finite is recorded as None, with an event that names it. `tensorboard=None` writes event files
    if TensorBoard is installed and prints a note if not; True raises if it is missing. Closing it closes the folder.
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
            raise BaguError(f"{folder.path} is open read-only", hint="open it with RunFolder.create")
        self.folder = folder
        self.others = [*([progress] if progress else []), *trackers]
        if tensorboard is None and environment.package_version("tensorboard") is None:
            print("bagu: no event files: TensorBoard is missing (pip install 'bagu[tensorboard]')", file=sys.stderr)
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
        configs.write_atomic(path, json.dumps(data, ensure_ascii=False, indent=2) + "\n")
        for observer in self.others:
            observer.on_sample(step, texts)

    def rewind(self, step: int) -> None:
        """Drop the rows and samples of `step` and later. The rows go in one truncation, safe against a kill."""
        _truncate(self.folder.metrics_path, step)
        for at, path in self.folder.sample_files():
            if at >= step:
                path.unlink()
        for observer in self.others:
            observer.rewind(step)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # close each one, even if closing another fails
            stack.callback(self.folder.close)
            for observer in self.others:
                stack.callback(observer.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an OSError (disk full, folder not writable) into a BaguError."""
    try:
        yield
    except OSError as error:
        raise BaguError(
            f"cannot write to the run folder {path}: {error.strerror or error}",
            hint="free some disk space, or give another folder",
        ) from error


# Rows


def _append(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row and flush it to the file. If the disk is full, remove the partial row and raise."""
    size = path.stat().st_size if path.exists() else 0
    try:
        record.append_rows(path, [row])
    except BaseException as error:
        if path.exists():
            os.truncate(path, size)
        if isinstance(error, OSError):
            raise BaguError(f"{path}: cannot write a row: {error}", hint="free some disk space, then resume") from error
        raise


def _drop_torn_row(path: Path) -> None:
    complete = sum(len(line) + 1 for line in complete_lines(path))
    if path.exists() and path.stat().st_size != complete:
        os.truncate(path, complete)


def _truncate(path: Path, step: int) -> None:
    """Drop the rows of `step` and later. Rows are in the order of steps, so this is one truncation."""
    keep = 0
    for line, row in zip(complete_lines(path), complete_rows(path), strict=True):
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
        f"metric {name} is a {type(value).__name__}", hint="a metric must be a number; convert a tensor with .item()"
    )
