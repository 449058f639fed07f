"""A table from a file: Parquet by its first bytes (needs pyarrow), else CSV."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from bagu.errors import BaguError
from bagu.process.table import Column, Table, column_of, header_names, parse_csv

MAX_BYTES = 2**30  # of a file; reading a CSV takes about ten times as much memory
PARQUET = b"PAR1"


def read_table(path: Path) -> Table:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BaguError(f"{path} has more than {MAX_BYTES >> 20} MiB", hint="give a part of the rows")
        data = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        raise BaguError(f"{path} is not a file", hint="give the path of a CSV or Parquet file") from None
    return parse_table(data, str(path))


def parse_table(data: bytes, name: str = "the file") -> Table:
    """Read the bytes of a file; `name` is for messages."""
    return _parquet(data, name) if data.startswith(PARQUET) else parse_csv(data, name)


def data_file(data: bytes) -> str:
    """The name under which a run keeps its data."""
    return "data.parquet" if data.startswith(PARQUET) else "data.csv"


def _parquet(data: bytes, name: str) -> Table:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BaguError("reading Parquet needs pyarrow", hint="pip install 'bagu[parquet]', or give a CSV") from None
    try:
        found = pyarrow.parquet.read_table(io.BytesIO(data))
    except (OSError, pyarrow.ArrowException) as error:
        text = str(error).split("\n")[0][:200]
        raise BaguError(f"cannot read {name} as Parquet: {text}", hint="write it again, or give a CSV") from None
    if not found.num_rows or not found.num_columns:
        raise BaguError(f"{name} has {found.num_columns} columns and no rows", hint="give a file with rows")
    notes: list[str] = []
    names, units = header_names(found.column_names, notes)
    columns = []
    for i, column_name in enumerate(names):
        kind, values = found.schema.types[i], found.column(i)
        if pyarrow.types.is_dictionary(kind):
            kind, values = kind.value_type, values.cast(kind.value_type)
        if pyarrow.types.is_timestamp(kind) or pyarrow.types.is_date(kind):
            stamps = values.cast(pyarrow.timestamp("ms")).to_numpy().astype("datetime64[ms]")
            seconds = np.where(np.isnat(stamps), np.nan, stamps.astype(np.int64) / 1000)
            columns.append(Column(name=column_name, kind="time", values=seconds))
        elif pyarrow.types.is_floating(kind) or pyarrow.types.is_integer(kind) or pyarrow.types.is_decimal(kind):
            numbers = values.cast(pyarrow.float64()).to_numpy()
            finite = np.where(np.isfinite(numbers), numbers, np.nan)
            columns.append(Column(name=column_name, kind="number", values=finite, unit=units[i]))
        elif pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_boolean(kind):
            cells = ["" if cell is None else str(cell).strip() for cell in values.to_pylist()]
            column, note = column_of(column_name, units[i], cells, decimal_comma=False)
            columns.append(column)
            notes += [note] if note else []
        else:
            notes.append(f"{column_name} holds {kind} and is left out")
    if not columns:
        raise BaguError(f"{name} has no column of numbers, times or texts", hint="give a flat table")
    return Table(columns=tuple(columns), notes=tuple(notes))
