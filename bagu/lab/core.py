"""What a lab is: a record (claim, regime, what varies, what is measured) and three functions.

    run(setting)   -> rows      measure, on the real parts of the package
    verdict(rows)  -> Verdict   decide from the numbers alone, so that other numbers give another verdict
    plot(fig, rows)             draw them on a matplotlib figure

A row is a flat dict. A key that holds a quantity ends in its unit: `time_ns`, `traffic_bytes`, `broken_percent`.
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
    """The number a row holds under `key`; for a verdict or a plot that cannot do without it."""
    value = row[key]
    if not isinstance(value, int | float):
        raise BaguError(f"{key} is {value!r} in the row {row}", hint="the lab's run() must give a number here")
    return float(value)


class Track(Protocol):
    """Hands out the points of a sweep one by one and shows how far it is."""

    def __call__(self, points: Sequence[T]) -> Iterator[T]: ...


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run is given: where it runs, whether to take the small sizes, and its progress line."""

    device: str
    quick: bool
    track: Track


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the numbers say about the claim."""

    kind: Kind
    sentence_en: str
    sentence_zh: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise BaguError(f"a verdict is one of {get_args(Kind)}, not {self.kind!r}")


@dataclass(frozen=True, kw_only=True)
class Record:
    """The words of a lab: stored with each result, so that a report needs no code of the lab."""

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
    """A record and the functions that fill it with numbers."""

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
        """Strict JSON: a NaN or an infinity in a row is a fault of the lab (None says that there is no number)."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> Result:
        """The result stored at `path`. A file of another schema, or a broken one, is named in the error."""
        hint = f"run the lab again, or delete {path.parent}"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BaguError(f"{path} is not JSON: {error}", hint=hint) from error
        found = data.pop("schema", None) if isinstance(data, dict) else None
        if found != SCHEMA:
            raise BaguError(f"{path} has schema {found!r}, this bagu reads {SCHEMA!r}", hint=hint)
        try:
            lab, verdict = Record(**data.pop("lab")), Verdict(**data.pop("verdict"))
            return cls(lab=lab, verdict=verdict, **data)
        except (KeyError, TypeError) as error:
            raise BaguError(f"{path} does not hold a lab result: {error}", hint=hint) from error
