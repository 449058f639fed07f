"""Rows of a table: JSON lines, JSON lists or Parquet, each row with all its columns and its place in the file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagu.data.json_rows import Row, json_rows
from bagu.data.source import ParquetSource, TextSource, describe_files, non_empty, open_source, parquet_file
from bagu.errors import BaguError


@dataclass(frozen=True)
class TableSource:
    """A file, or the files of a folder that match `glob`; the kind is chosen by the file names."""

    path: Path
    glob: str | None = None

    def rows(self) -> Iterator[Row]:
        """The rows in the order of the files. A file without rows is skipped; a table without any is refused."""
        kind, files = self._found()
        rows = parquet_rows(files) if kind is ParquetSource else json_rows(files)
        return non_empty(rows, self.path)

    def describe(self) -> dict[str, Any]:
        kind, files = self._found()
        return describe_files("parquet" if kind is ParquetSource else "jsonl", files)

    def _found(self) -> tuple[type, list[tuple[str, Path]]]:
        source = open_source(self.path, self.glob)
        files = source.files()
        if isinstance(source, TextSource):
            raise BaguError(f"{files[0][1]} is not JSON or Parquet", hint="give .jsonl, .json or .parquet files")
        return type(source), files


def parquet_rows(files: list[tuple[str, Path]]) -> Iterator[Row]:
    """The rows of Parquet files given as (relative name, path), read in batches. The first row of a file is row 1."""
    for name, path in files:
        with parquet_file(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(f"{name}:{number}", f"{path}: row {number}", fields)
