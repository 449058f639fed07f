"""JSON rows: objects from JSON lines (one per line) and from .json files (a list of objects, or JSON lines).

Each row knows its file and line; error messages start with them.
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagu.data.encoding import recognise
from bagu.errors import BaguError


@dataclass(frozen=True, slots=True)
class Row:
    """A JSON object and its location: `id` uses the relative name, `place` the path, for error messages."""

    id: str
    place: str
    fields: Mapping[str, Any]

    def text(self, field: str) -> str:
        if field not in self.fields:
            raise BaguError(f"{self.place}: no field {field!r}", hint=f"found {self.found}")
        return self.string(self.fields[field], f"field {field!r}")

    def string(self, value: Any, what: str) -> str:
        if not isinstance(value, str):
            raise BaguError(f"{self.place}: {what} is a {type(value).__name__}, not a string")
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can encode a lone surrogate: "\ud83d"
            reason = f"a lone surrogate at character {error.start}"
            raise BaguError(f"{self.place}: {what} is not Unicode text: {reason}", hint="correct that line") from error
        return value

    @property
    def found(self) -> str:
        """The fields of the row, for a hint."""
        return ", ".join(self.fields) or "an empty object"


def json_rows(files: list[tuple[str, Path]]) -> Iterator[Row]:
    """The rows of files given as (relative name, path). JSON lines stream; a list in a .json file is read at once."""
    for name, path in files:
        try:
            if path.name.removesuffix(".gz").endswith(".json"):
                yield from _from_json(name, path)
            else:
                yield from _from_lines(name, path)
        except (OSError, EOFError, zlib.error) as error:
            raise BaguError(f"cannot read {path}: {error}", hint="correct it or leave it out") from error


def _from_lines(name: str, path: Path) -> Iterator[Row]:
    """Yield a row per line that is not blank."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}:{number}"
                yield Row(f"{name}:{number}", place, _object(place, _parsed(place, line)))


def _from_json(name: str, path: Path) -> Iterator[Row]:
    """The objects of a list. A file that starts with an object is JSON lines, or one object over several lines."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read()
    if data.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"{":
        try:
            rows = [json.loads(data)]
        except (ValueError, RecursionError):
            yield from _from_lines(name, path)
            return
    else:
        rows = _parsed(str(path), data)
        if not isinstance(rows, list):
            raise BaguError(
                f"{path} holds a {type(rows).__name__}; expected a list of JSON objects",
                hint="write [{...}, {...}], or one object per line; rename a text file to .txt",
            )
    for number, row in enumerate(rows, start=1):
        place = f"{path}: item {number}"
        yield Row(f"{name}:{number}", place, _object(place, row))


def _parsed(place: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, or an integer of thousands of digits
        content = recognise(data, complete=False)
        recognised = content not in ("utf-8", "unknown")
        hint = f"the file looks like {content}; write it as UTF-8" if recognised else "correct or delete that line"
        raise BaguError(f"{place}: not JSON: {error}", hint=hint) from error
    except RecursionError as error:
        raise BaguError(f"{place}: the JSON is nested too deeply", hint="correct or delete that line") from error


def _object(place: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BaguError(f"{place}: expected a JSON object, got a {type(row).__name__}")
    return row
