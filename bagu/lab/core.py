"""A lab: a record (claim, regime, variables, measurements) and three functions.

    run(setting)   -> rows      measure with bagu's parts
    verdict(rows)  -> Verdict   decide from the numbers only, so that other numbers give another verdict
    plot(rows)     -> panels    declare what is drawn (plot.py)

A row is a flat dict. A key of a quantity ends in its unit: `time_ns`, `traffic_bytes`, `broken_percent`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

from bagu.errors import BaguError
from bagu.lab.plot import Panel
from bagu.lab.rows import Row as Row
from bagu.lab.rows import column as column
from bagu.lab.rows import names_in as names_in
from bagu.lab.rows import number as number
from bagu.lab.rows import numbers_in as numbers_in
from bagu.lab.rows import where as where

SCHEMA = "bagu.lab/1"
LOADED = 1.5  # waiting processes a core: times of a machine with more are marked

Kind = Literal["held", "did not hold", "holds only where", "not decided"]
CLASS = {"held": "held", "did not hold": "not", "holds only where": "only", "not decided": "open"}  # in style sheets
WORD_ZH = {"held": "成立", "did not hold": "不成立", "holds only where": "只在某些条件下成立", "not decided": "未定"}
T = TypeVar("T")


class Text(NamedTuple):
    """A text in both languages."""

    en: str
    zh: str


def say(en: str, zh: str, **values: object) -> Text:
    """Both templates with the same values, each formatted once; a Text among them gives its own language."""
    each = [{k: v[i] if isinstance(v, Text) else v for k, v in values.items()} for i in (0, 1)]
    return Text(en.format(**each[0]), zh.format(**each[1]))


def listed(parts: Iterable[Text | str], en: str = ", ", zh: str = "，") -> Text:
    """The parts joined in each language."""
    texts = [part if isinstance(part, Text) else Text(part, part) for part in parts]
    return Text(en.join(t.en for t in texts), zh.join(t.zh for t in texts))


def share_met(met: Iterable[bool]) -> Kind:
    """The verdict of a claim of several parts: held if all are met, holds only where some are."""
    found = list(met)
    return "held" if all(found) else "holds only where" if any(found) else "did not hold"


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
    """The result of comparing the numbers with the claim. One that is not decided says what it would take. `size` is
    that of the models it is about: parameters, steps, seeds."""

    kind: Kind
    sentence_en: str
    sentence_zh: str
    takes_en: str = ""
    takes_zh: str = ""
    size: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise BaguError(f"a verdict must be one of {get_args(Kind)}, got {self.kind!r}")
        if (self.kind == "not decided") != bool(self.takes_en and self.takes_zh):
            raise BaguError("a verdict says what it would take if and only if it is not decided")

    @classmethod
    def say(cls, kind: Kind, en: str, zh: str, /, **values: object) -> Verdict:
        """A verdict from the templates of its sentence, as in `say`."""
        text = say(en, zh, **values) if values else Text(en, zh)
        return cls(kind=kind, sentence_en=text.en, sentence_zh=text.zh)

    def undecided(self, takes_en: str, takes_zh: str) -> Verdict:
        """The same numbers without a decision."""
        return replace(self, kind="not decided", takes_en=takes_en, takes_zh=takes_zh)

    def of_size(self, size: str) -> Verdict:
        return replace(self, size=size)


Evidence = Literal["training", "model", "timing", "counting"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The texts of a lab: `LAB` in its module.

    `evidence` is what decides: models that are trained and compared (a quick run cannot decide, and three seeds are the
    least), what one trained model does (a quick run cannot decide), times (those of a loaded machine are marked), or
    counts and exact arithmetic.
    """

    title_en: str
    title_zh: str
    claim_en: str
    claim_zh: str
    regime: str
    varies: str
    measures: str
    evidence: Evidence = "counting"
    needs_gpu: bool = False
    published_en: str = ""  # a result at large scale to stand beside a toy's, with its source
    published_zh: str = ""


@dataclass(frozen=True, kw_only=True)
class Record(Claim):
    """A lab's texts under its name, stored with each result, so that a report does not need the lab's code."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Lab(Record):
    """A record, and the functions of the lab's module that measure it."""

    run: Callable[[Setting], Iterable[Row]]
    verdict: Callable[[Sequence[Row]], Verdict]
    plot: Callable[[Sequence[Row]], Sequence[Panel]]

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
    code: str = ""  # a digest of the lab's code; "" in a record from before there was one
    load: float | None = None  # waiting processes a core when the run began; None if the system does not say

    @property
    def loaded(self) -> bool:
        """Whether times decide this lab and other programs were using the machine."""
        return self.lab.evidence == "timing" and (self.load or 0.0) > LOADED

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
