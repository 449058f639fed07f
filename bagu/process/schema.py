"""What each column is for: roles, bounds, steps, signs, limits; kept in one TOML file that a person can edit."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from bagu.config.fields import from_dict
from bagu.config.files import write_atomic
from bagu.errors import BaguError, UnknownName
from bagu.process.table import Kind

Role = Literal["setting", "context", "target", "group", "time", "id", "ignore"]
ROLES = get_args(Role)
HEAD = """\
# Roles: setting (you choose it), context (given: weather, raw material, wear), target (measured result), group (a
# batch: its rows stay on one side of a split), time, id, ignore. Edit freely; `bagu process fit` reads this file.
"""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One column. `low` and `high` bound what may be recommended; rows outside still train the model. `step` is the
    machine's resolution, `move` the largest change from the present value, `sign` +1 or -1 if the target can only rise
    or fall with it, `goal` what to do with a target."""

    name: str
    role: Role
    kind: Kind = "number"
    unit: str = ""
    goal: Literal["max", "min", "none"] = "none"
    low: float | None = None
    high: float | None = None
    step: float | None = None
    move: float | None = None
    sign: int = 0
    levels: tuple[str, ...] = ()  # of a category, most frequent first

    def __post_init__(self) -> None:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise BaguError(f"{self.name}: low {self.low:g} is above high {self.high:g}", hint="correct the bounds")
        if self.step is not None and not self.step > 0:
            raise BaguError(f"{self.name}: step is {self.step:g}", hint="give a step above 0, or none")
        if self.sign not in (-1, 0, 1):
            raise BaguError(f"{self.name}: sign is {self.sign}", hint="give 1, -1 or 0")


@dataclass(frozen=True, kw_only=True)
class Schema:
    columns: tuple[Field, ...]
    limits: tuple[str, ...] = ()  # e.g. "purity >= 99.2"

    def of(self, *roles: Role) -> list[Field]:
        return [field for field in self.columns if field.role in roles]

    @property
    def inputs(self) -> list[Field]:
        """Settings, then contexts: what the models read."""
        return [*self.of("setting"), *self.of("context")]

    @property
    def target(self) -> Field:
        """The target to improve: the first with a goal."""
        goals = [field for field in self.of("target") if field.goal != "none"]
        if not goals:
            raise BaguError("no column is a target with a goal", hint="give --target NAME:max or NAME:min")
        return goals[0]

    def __getitem__(self, name: str) -> Field:
        for field in self.columns:
            if field.name == name:
                return field
        raise UnknownName.among("column", name, [field.name for field in self.columns])

    def with_field(self, field: Field) -> Schema:
        return replace(self, columns=tuple(field if f.name == field.name else f for f in self.columns))


def read_schema(path: Path) -> Schema:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BaguError(f"{path}: {error}", hint="correct the file, or delete it and run `bagu process look`") from None
    return schema_of(data, str(path))


def schema_of(data: Any, where: str) -> Schema:
    """A schema of plain data, as TOML or JSON gives it."""
    if isinstance(data, dict) and isinstance(data.get("columns"), dict):
        data = data | {"columns": [{"name": name, **entry} for name, entry in data["columns"].items()]}
    return from_dict(Schema, data, where)


def write_schema(schema: Schema, path: Path) -> None:
    write_atomic(path, schema_text(schema))


def schema_text(schema: Schema) -> str:
    lines = [HEAD, f"limits = [{', '.join(map(_quoted, schema.limits))}]"]
    for field in schema.columns:
        lines.append(f"\n[columns.{_quoted(field.name)}]")
        for spec in fields(Field)[1:]:
            value = getattr(field, spec.name)
            if spec.name == "role" or value != spec.default:
                lines.append(f"{spec.name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
