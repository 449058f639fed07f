"""Inputs as a matrix: numbers in units of their spread, a column per level of a category, the median for a gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from bagu.errors import BaguError
from bagu.process.schema import Field
from bagu.process.table import Table

MOST_LEVELS = 30


@dataclass(frozen=True)
class Encoder:
    """`centre` and `scale` are per input (not per column of the matrix); a category has 0 and 1 there."""

    fields: tuple[Field, ...]
    centre: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, table: Table, fields: Sequence[Field]) -> Self:
        """Constant columns are left out: nothing can be learned from them."""
        kept: list[Field] = []
        centre: list[float] = []
        scale: list[float] = []
        for field in fields:
            column = table[field.name]
            filled = column.values[~column.missing]
            if len(np.unique(filled)) < 2:
                continue
            if column.kind == "category":
                if len(field.levels) > MOST_LEVELS:
                    raise BaguError(
                        f"{field.name} has {len(field.levels)} levels",
                        hint=f"set it to ignore, or to {MOST_LEVELS} or fewer",
                    )
                kept, centre, scale = [*kept, field], [*centre, 0.0], [*scale, 1.0]
            else:
                spread = float(np.std(filled)) or 1.0
                kept, centre, scale = [*kept, field], [*centre, float(np.median(filled))], [*scale, spread]
        if not kept:
            raise BaguError("no input varies in these rows", hint="give settings or contexts that change")
        return cls(tuple(kept), np.array(centre), np.array(scale))

    @property
    def names(self) -> list[str]:
        return [field.name for field in self.fields]

    @property
    def owner(self) -> np.ndarray:
        """For each column of the matrix, the number of its input."""
        return np.repeat(np.arange(len(self.fields)), [max(1, len(f.levels)) for f in self.fields])

    @property
    def categories(self) -> list[np.ndarray]:
        """The columns of the matrix of each category."""
        return [np.flatnonzero(self.owner == i) for i, f in enumerate(self.fields) if f.levels]

    @property
    def signs(self) -> np.ndarray:
        return np.array([self.fields[i].sign for i in self.owner])

    def matrix(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Rows of inputs by name, in their units; a missing number takes the median."""
        parts = []
        for field, centre, scale in zip(self.fields, self.centre, self.scale, strict=True):
            column = values[field.name]
            if field.levels:
                # half a unit apart, so that two levels are one unit of distance apart
                parts.append(np.stack([(column == level) / np.sqrt(2) for level in field.levels], 1))
            else:
                number = np.where(np.isnan(column), centre, column)
                parts.append(((number - centre) / scale)[:, None])
        return np.hstack(parts)

    def of_table(self, table: Table) -> np.ndarray:
        return self.matrix({name: table[name].values for name in self.names})

    def of_rows(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """The matrix of rows as dictionaries, each with every input."""
        return self.matrix(
            {
                f.name: np.array([row[f.name] for row in rows], dtype=str if f.levels else np.float64)
                for f in self.fields
            }
        )
