"""The files of a training run, and functions that read them.

    config.json        the configuration                   metrics.jsonl   one row per step
    environment.json   software versions and machine       events.jsonl    a log of starts, skips, rollbacks, saves
    checkpoints/       written by the trainer              samples/        sampled texts by step
    tensorboard/       event files, if it is installed     report.html     written by `bagu.train.report`
    run.lock           the process that writes

Reading needs no lock and may happen while the run is active.
"""

import json
import os
from pathlib import Path
from typing import Any

from bagu.errors import BaguError


class RunFiles:
    """The paths of a run and their content."""

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

    def is_run(self) -> bool:
        return self.config_path.exists()

    def config(self) -> dict[str, Any]:
        """The configuration of the run as plain JSON; `bagu.config.load` builds the dataclasses."""
        return _read_object(self.config_path)

    def environment(self) -> dict[str, Any]:
        return _read_object(self.environment_path)

    def metrics(self) -> list[dict[str, Any]]:
        """One row per step, in the order of steps."""
        return complete_rows(self.metrics_path)

    def events(self) -> list[dict[str, Any]]:
        """The event log, in the order of time."""
        return complete_rows(self.events_path)

    def samples(self) -> dict[int, list[str]]:
        """The sampled texts by step, in the order of steps."""
        return {step: _read_object(path)["texts"] for step, path in self.sample_files()}

    def sample_files(self) -> list[tuple[int, Path]]:
        return [(int(path.stem), path) for path in sorted(self.samples_path.glob("[0-9]*.json"))]


def complete_rows(path: Path) -> list[dict[str, Any]]:
    """The rows, without one that is still being written."""
    rows = []
    for number, line in enumerate(complete_lines(path), start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise BaguError(f"{path}:{number}: not JSON: {error}", hint="correct or delete that line") from error
    return rows


def complete_lines(path: Path) -> list[bytes]:
    """The complete lines, without their line ends."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BaguError(f"{path} does not exist", hint=f"{path.parent} is not a run folder") from None
    except (ValueError, RecursionError) as error:
        raise BaguError(f"{path}: not JSON: {error}", hint="correct the file") from error
    if not isinstance(data, dict):
        raise BaguError(f"{path} holds a {type(data).__name__}, not a JSON object", hint="correct the file")
    return data
