"""A table of named columns, read from CSV as machines and spreadsheets write it.

Encodings (UTF-8 and UTF-16 with or without a mark, GB18030), separators (comma, semicolon, tab, bar), decimal commas,
thousands, units in the header or in the cells, dates in three orders and the words for a missing value are recognised.
Nothing is dropped in silence: `notes` says what was changed and which lines were left out.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from bagu.errors import BaguError
from bagu.process.cells import MISSING, number_columns, times

Kind = Literal["number", "category", "time"]
SEPARATORS = ",;\t|"
HEADER_UNIT = re.compile(r"^(.*?)\s*[\[(（]\s*([^\[\]()（）]{1,16})\s*[\])）]\s*$")
UNIT_CELL = re.compile(r"^[\[(]?\s*(°?[A-Za-zµμ%Ω‰°][A-Za-zµμ%Ω‰°0-9/^.·*²³ -]{0,11})\s*[\])]?$")


@dataclass(frozen=True, kw_only=True)
class Column:
    """`values` is float64 with NaN for a missing number or time (seconds since 1970), str with "" for a category."""

    name: str
    kind: Kind
    values: np.ndarray
    unit: str = ""
    other_units: tuple[str, ...] = ()  # units that some cells have instead

    @property
    def missing(self) -> np.ndarray:
        return np.isnan(self.values) if self.kind != "category" else self.values == ""


@dataclass(frozen=True, kw_only=True)
class Table:
    columns: tuple[Column, ...]
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.columns[0].values) if self.columns else 0

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def __getitem__(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def take(self, rows: np.ndarray) -> Table:
        return replace(self, columns=tuple(replace(c, values=c.values[rows]) for c in self.columns))


def parse_csv(data: bytes, name: str = "the file") -> Table:
    """Read the bytes of a CSV file; `name` is for messages."""
    text, notes = _decoded(data, name)
    lines = text.splitlines()
    if not any(line.strip() for line in lines):
        raise BaguError(f"{name} is empty", hint="give a CSV file with a header line and rows")
    separator = _separator(lines[:200])
    csv.field_size_limit(2**24)
    try:
        rows = [row for row in csv.reader(io.StringIO(text), delimiter=separator) if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise BaguError(f"{name} is not a CSV file: {error}", hint="export the table again as CSV") from None
    if separator != ",":
        notes.append(f"the separator is {separator!r}")
    header, units, body = _header(rows, notes)
    if not body:
        raise BaguError(f"{name} has a header of {len(header)} columns and no rows", hint="give a file with rows")
    long = [i for i, row in enumerate(body) if len(row) > len(header) and any(c.strip() for c in row[len(header) :])]
    if long:
        notes.append(
            f"{len(long)} rows have more cells than the header and are left out; the first is row {long[0] + 1}"
        )
        left_out = set(long)
        body = [row for i, row in enumerate(body) if i not in left_out]
        if not body:
            raise BaguError(f"{name}: every row has more cells than the header", hint="correct the header line")
    width = len(header)
    padded = [row[:width] + [""] * (width - len(row)) for row in body]
    columns = []
    for j, cells in enumerate(zip(*padded, strict=True)):
        column, note = column_of(header[j], units[j], [cell.strip() for cell in cells], decimal_comma=separator != ",")
        columns.append(column)
        notes += [note] if note else []
    return Table(columns=tuple(columns), notes=tuple(notes))


def _decoded(data: bytes, name: str) -> tuple[str, list[str]]:
    if data.startswith(b"\xef\xbb\xbf"):
        return data[3:].decode("utf-8", "replace"), []
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", "replace"), ["the encoding is UTF-16"]
    head = data[:4000]
    if head.count(0) > len(head) // 4:
        return data.decode("utf-16-le" if head[1::2].count(0) > head[::2].count(0) else "utf-16-be", "replace"), [
            "the encoding is UTF-16"
        ]
    if 0 in head:
        raise BaguError(f"{name} is not text: it has zero bytes", hint="export the table as CSV")
    for encoding in ("utf-8", "gb18030"):
        try:
            return data.decode(encoding), [] if encoding == "utf-8" else ["the encoding is GB18030"]
        except UnicodeDecodeError:
            continue
    return data.decode("cp1252", "replace"), ["the encoding is none of UTF-8, UTF-16, GB18030; read as Windows-1252"]


def _separator(lines: list[str]) -> str:
    """The separator that cuts most lines into the same number of cells, more than one; else the comma."""
    filled = [line for line in lines if line.strip()]
    best, share = ",", (0.0, 0)
    for separator in SEPARATORS:
        counts = Counter(len(row) for row in csv.reader(filled, delimiter=separator) if row)
        width, rows = counts.most_common(1)[0] if counts else (1, 0)
        # a decimal comma also cuts numbers: a semicolon or tab that fits wins over it
        found = (rows / len(filled) + (0.5 if separator in ";\t" else 0.0), width)
        if width > 1 and found > share:
            best, share = separator, found
    return best


def header_names(cells: Sequence[str], notes: list[str]) -> tuple[list[str], list[str]]:
    """Names, each once, and units of the cells of a header."""
    names, units, seen = [], [], Counter[str]()
    for j, cell in enumerate(cells):
        match = HEADER_UNIT.match(cell)
        name, unit = (match[1].strip(), match[2].strip()) if match and match[1].strip() else (cell, "")
        name = name or f"column_{j + 1}"
        seen[name] += 1
        if seen[name] > 1:
            notes.append(f"the name {name!r} stands {seen[name]} times; this one is now {name}.{seen[name]}")
            name = f"{name}.{seen[name]}"
        names.append(name)
        units.append(unit)
    return names, units


def _header(rows: list[list[str]], notes: list[str]) -> tuple[list[str], list[str], list[list[str]]]:
    """Names, units and the other rows. A second line that has only units is read as such."""
    first = [cell.strip() for cell in rows[0]]
    while first and not first[-1] and all(len(row) < len(first) or not row[len(first) - 1].strip() for row in rows[1:]):
        first.pop()
    names, units = header_names(first, notes)
    body = rows[1:]
    if len(body) > 1:
        second, third = [c.strip() for c in body[0]], [c.strip() for c in body[1]]
        numeric = [j for j, c in enumerate(third[: len(names)]) if re.match(r"^[-+]?[\d.,]+$", c)]
        if numeric and all(j < len(second) and UNIT_CELL.match(second[j]) for j in numeric):
            notes.append("the second line is read as units")
            units = [second[j].strip("[]() ") if j in numeric else units[j] for j in range(len(names))]
            body = body[1:]
    return names, units, body


def column_of(name: str, unit: str, cells: list[str], *, decimal_comma: bool) -> tuple[Column, str]:
    numbers = number_columns(cells, decimal_comma=decimal_comma)
    filled = sum(cell.casefold() not in MISSING for cell in cells)
    good = int(np.isfinite(numbers.values).sum())
    if good and good >= 0.8 * filled:
        lost = filled - good
        note = f"{name}: {lost} of {filled} cells are not numbers and count as missing" if lost else ""
        return Column(
            name=name, kind="number", values=numbers.values, unit=unit or numbers.unit, other_units=numbers.other_units
        ), note
    stamps, note = times(cells)
    if stamps is not None:
        return Column(name=name, kind="time", values=stamps), f"{name}: {note}" if note else ""
    values = np.array(["" if cell.casefold() in MISSING else cell for cell in cells], dtype=str)
    return Column(name=name, kind="category", values=values), ""
