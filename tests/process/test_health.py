"""Faults are injected into a healthy history; the report names each, and names none in the healthy one."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from bagu.process.health import examine
from bagu.process.plants import PLANTS
from bagu.process.plants.history import history
from bagu.process.schema import Field, Schema
from bagu.process.table import Column, Table

HEALTHY = history(PLANTS["reactor"], 300, 3, batches=True)


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Table:
    table = HEALTHY.table
    return replace(
        table,
        columns=tuple(replace(c, values=change(c.values.copy())) if c.name == name else c for c in table.columns),
    )


def added(name: str, values: np.ndarray) -> tuple[Table, Schema]:
    column = Column(name=name, kind="number", values=values)
    fields = (*HEALTHY.schema.columns, Field(name=name, role="setting"))
    return replace(HEALTHY.table, columns=(*HEALTHY.table.columns, column)), replace(HEALTHY.schema, columns=fields)


def kinds(table: Table, schema: Schema = HEALTHY.schema) -> set[str]:
    return {f.kind for f in examine(table, schema)}


def stick(v: np.ndarray) -> np.ndarray:
    v[100:160] = v[100]
    return v


def fahrenheit(v: np.ndarray) -> np.ndarray:
    v -= 273.15
    v[150:] = v[150:] * 1.8 + 32
    return v


def lose(v: np.ndarray) -> np.ndarray:
    v[np.argsort(HEALTHY.table["yield"].values)[:40]] = np.nan
    return v


def test_a_healthy_history_is_called_healthy() -> None:
    assert kinds(HEALTHY.table) == set()


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("stuck", changed("activity", stick)),
        ("unit_jump", changed("temperature", fahrenheit)),
        ("missing_with_target", changed("feed", lose)),
        ("constant", changed("feed", lambda v: v * 0 + 3)),
        ("outliers", changed("feed", lambda v: np.where(np.arange(300) == 7, 1e4, v))),
        ("drift", changed("yield", lambda v: v + 40 * (np.arange(300) > 210))),
        ("duplicates", HEALTHY.table.take(np.r_[0:300, 0:5])),
    ],
)
def test_a_fault_is_named(kind: str, table: Table) -> None:
    assert kind in kinds(table)
    assert all(f.words(lang) for f in examine(table, HEALTHY.schema) for lang in ("en", "zh"))


def test_leaks_and_settings_that_move_together() -> None:
    y, temperature = HEALTHY.table["yield"].values, HEALTHY.table["temperature"].values
    assert "leak" in kinds(*added("lab", 1.8 * y))
    assert "lagged" in kinds(*added("before", np.r_[y[0], y[:-1]]))
    assert "together" in kinds(*added("jacket", temperature * 0.9 + 0.01 * np.arange(300) % 3))


def test_operators_who_react_to_the_target_are_named() -> None:
    y = HEALTHY.table["yield"].values
    reaction = np.r_[0, -y[:-1]] + 0.5 * np.std(y) * np.random.default_rng(0).standard_normal(300)
    assert "reverse" in kinds(*added("knob", reaction))
