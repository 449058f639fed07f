"""Records: JSON-lines files of measured numbers, one file per machine.

Rows are only appended, and several processes may append to one file.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bagu.errors import BaguError
from bagu.machine import device


def record_file(folder: Path) -> Path:
    """This machine's results file in `folder`. Raises before the measurement if the file is not writable."""
    path = ensure_folder(folder) / f"{device.this_machine().name}.jsonl"
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        raise BaguError(f"{path} is not a writable file", hint="give another folder with --out")
    return path


def ensure_folder(folder: Path) -> Path:
    """Create the folder if needed; raise if it is not writable."""
    hint = "give another folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BaguError(f"cannot create the folder {folder}: {error.strerror or error}", hint=hint) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BaguError(f"the folder {folder} is not writable", hint=hint)
    return folder


def append_rows(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Append `rows` as JSON lines, all or none, in one write: rows of several processes do not mix within a line.

    Creates missing parent folders. NaN and infinity are refused, because JSON cannot represent them.
    """
    path = Path(path)
    data = "".join(_line(path, number, row) for number, row in enumerate(rows)).encode()
    if not data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
    try:
        written = os.write(fd, data)
    finally:
        os.close(fd)
    if written != len(data):
        raise BaguError(f"{path}: {written} of {len(data)} bytes were written", hint="free some disk space")


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file in order. Empty lines are skipped; a broken line raises."""
    path = Path(path)
    if not path.exists():
        raise BaguError(f"record file {path} does not exist", hint="run the benchmark that writes it first")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise BaguError(f"{path}:{number}: not JSON: {error}", hint="correct or delete that line") from error
        if not isinstance(row, dict):
            raise BaguError(f"{path}:{number}: expected a JSON object, got a {type(row).__name__}")
        rows.append(row)
    return rows


def _line(path: Path, number: int, row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(row), allow_nan=False, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        hint = "rows must hold JSON values; write None for a number that is not finite"
        raise BaguError(f"row {number} for {path} is not JSON: {error}", hint=hint) from error
