"""JSON rows: objects from JSON lines (one a line) and from .json files (a list of objects, or JSON lines after all).

Each row knows its file and line, and an error about one begins with them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagu.errors import BaguError

__all__ = ["Row", "json_rows"]


@dataclass(frozen=True, slots=True)
class Row:
    """A JSON object and where it stands: `id` by the relative name, `place` by the path, for errors."""

    id: str
    place: str
    fields: Mapping[str, Any]

    def text(self, field: str) -> str:
        if field not in self.fields:
            raise BaguError(f"{self.place}: there is no field {field!r}", hint=f"found {self.found}")
        return self.string(self.fields[field], f"field {field!r}")

    def string(self, value: Any, what: str) -> str:
        if not isinstance(value, str):
            raise BaguError(f"{self.place}: {what} is a {type(value).__name__}, not a string")
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair: "\ud83d"
            reason = f"half of a surrogate pair at character {error.start}"
            raise BaguError(f"{self.place}: {what} is not Unicode text: {reason}", hint="mend that line") from error
        return value

    @property
    def found(self) -> str:
        """The fields there are, for a hint."""
        return ", ".join(self.fields) or "an empty object"


def json_rows(files: list[tuple[str, Path]]) -> Iterator[Row]:
    """The rows of files given as (relative name, path). JSON lines stream; a list in a .json file is read whole."""
    for name, path in files:
        try:
            if path.name.removesuffix(".gz").endswith(".json"):
                yield from _from_json(name, path)
            else:
                yield from _from_lines(name, path)
        except (OSError, EOFError) as error:
            raise BaguError(f"{path} cannot be read: {error}", hint="mend it or leave it out") from error


def _from_lines(name: str, path: Path) -> Iterator[Row]:
    """Every line that is not blank."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}:{number}"
                yield Row(f"{name}:{number}", place, _object(place, _parsed(place, line)))


def _from_json(name: str, path: Path) -> Iterator[Row]:
    """The objects of a list. What begins as an object is JSON lines by another name, or one row over several lines."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read()
    if data.lstrip()[:1] == b"{":
        try:
            rows = [json.loads(data)]
        except (ValueError, RecursionError):
            yield from _from_lines(name, path)
            return
    else:
        rows = _parsed(str(path), data)
        if not isinstance(rows, list):
            raise BaguError(
                f"{path} holds a {type(rows).__name__}, and rows are a list of JSON objects",
                hint="write [{...}, {...}], or one object a line; text that is no data needs another name, .txt say",
            )
    for number, row in enumerate(rows, start=1):
        place = f"{path}: item {number}"
        yield Row(f"{name}:{number}", place, _object(place, row))


def _parsed(place: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BaguError(f"{place}: not JSON: {error}", hint="mend or delete that line") from error
    except RecursionError as error:
        raise BaguError(f"{place}: the JSON is nested too deeply", hint="mend or delete that line") from error


def _object(place: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BaguError(f"{place}: a row is a JSON object, this is a {type(row).__name__}")
    return row
