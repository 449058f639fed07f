"""A lab: a record (claim, regime, variables, measurements) and three functions.

    run(setting)   -> rows      measure with bagu's parts
    verdict(rows)  -> Verdict   decide from the numbers only, so that other numbers give another verdict
    plot(fig, rows)             draw them on a matplotlib figure

A row is a flat dict. A key of a quantity ends in its unit: `time_ns`, `traffic_bytes`, `broken_percent`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

from bagu.errors import BaguError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "bagu.lab/1"

Row = dict[str, str | int | float | bool | None]
Kind = Literal["held", "did not hold", "holds only where"]
T = TypeVar("T")


def number(row: Row, key: str) -> float:
    """The number under `key` in a row; raises if it is missing."""
    value = row[key]
    if not isinstance(value, int | float):
        raise BaguError(f"{key} is {value!r} in the row {row}", hint="the lab's run() must return a number here")
    return float(value)


class Track(Protocol):
    """Iterates over the points of a sweep and shows the progress."""

    def __call__(self, points: Sequence[T]) -> Iterator[T]: ...


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The arguments of a run: device, whether to use small sizes, and progress output."""

    device: str
    quick: bool
    track: Track


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of comparing the numbers with the claim."""

    kind: Kind
    sentence_en: str
    sentence_zh: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise BaguError(f"a verdict must be one of {get_args(Kind)}, got {self.kind!r}")


@dataclass(frozen=True, kw_only=True)
class Record:
    """The texts of a lab. They are stored with each result, so that a report does not need the lab's code."""

    name: str
    title_en: str
    title_zh: str
    claim_en: str
    claim_zh: str
    regime: str
    varies: str
    measures: str
    needs_gpu: bool


@dataclass(frozen=True, kw_only=True)
class Lab(Record):
    """A record and the functions that measure it."""

    run: Callable[[Setting], list[Row]]
    verdict: Callable[[Sequence[Row]], Verdict]
    plot: Callable[[Figure, Sequence[Row]], None]

    def record(self) -> Record:
        return Record(**{field.name: getattr(self, field.name) for field in fields(Record)})


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run of one lab on one machine."""

    lab: Record
    rows: list[Row]
    verdict: Verdict
    environment: dict[str, Any]
    machine: str
    device: str
    quick: bool
    seconds: float

    def to_json(self) -> str:
        """Strict JSON: NaN or infinity in a row is a bug of the lab (use None for a missing number)."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read the result at `path`. A broken file, or one with another schema, raises an error that names it."""
        hint = f"run the lab again, or delete {path.parent}"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BaguError(f"{path} is not JSON: {error}", hint=hint) from error
        found = data.pop("schema", None) if isinstance(data, dict) else None
        if found != SCHEMA:
            raise BaguError(f"{path} has schema {found!r}, but this version reads {SCHEMA!r}", hint=hint)
        try:
            lab, verdict = Record(**data.pop("lab")), Verdict(**data.pop("verdict"))
            return cls(lab=lab, verdict=verdict, **data)
        except (KeyError, TypeError) as error:
            raise BaguError(f"{path} is not a lab result: {error}", hint=hint) from error
