"""The rows of a lab, and how to read them. `bagu.lab.core` hands these names to the labs."""

from collections.abc import Sequence

from bagu.errors import BaguError

Row = dict[str, str | int | float | bool | None]


def number(row: Row, key: str) -> float:
    """The number under `key` in a row; raises if it is missing."""
    value = row[key]
    if not isinstance(value, int | float):
        raise BaguError(f"{key} is {value!r} in the row {row}", hint="the lab's run() must return a number here")
    return float(value)


def where(rows: Sequence[Row], **equal: object) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in equal.items())]


def column(rows: Sequence[Row], key: str) -> list[float]:
    return [number(row, key) for row in rows]


def names_in(rows: Sequence[Row], key: str) -> list[str]:
    """The different texts of a column, in the order of the rows."""
    return list(dict.fromkeys(str(row[key]) for row in rows if row.get(key) is not None))


def numbers_in(rows: Sequence[Row], key: str) -> list[float]:
    """The different numbers of a column, sorted."""
    return sorted({number(row, key) for row in rows if row.get(key) is not None})
